"""The demonstration: four methods, one budget, one table. Resumes where it left off."""

from pathlib import Path

from mcvae.runs.config import DataConfig, EvaluationSettings, RunConfig, TrainConfig
from mcvae.runs.method import parse_key
from mcvae.runs.results import read_result
from mcvae.training.evaluate_run import evaluate_run
from mcvae.training.run import train

__all__ = ["run_demo"]

DEMO_METHODS = {"vae": "vae", "iwae": "iwae-10", "l-mcvae": "l-mcvae-k5", "a-mcvae": "a-mcvae-k5"}
"""By the name of the folder."""


def run_demo(folder: str, epochs: int, seed: int) -> list[str]:
    """Train, evaluate and return the run folders."""
    runs = []
    for name, key in DEMO_METHODS.items():
        run = Path(folder) / name
        if (run / "config.yaml").exists():
            train(resume=run)
        else:
            print(f"training {name} on digits, {epochs} epochs", flush=True)
            config = RunConfig(epochs=epochs, seed=seed, folder=str(run))
            train(TrainConfig(data=DataConfig("digits", batch_size=50), method=parse_key(key), run=config))
        if read_result(run).evaluation is None:
            print(f"evaluating {name} on test images", flush=True)
            evaluate_run(run, EvaluationSettings(num_samples=16, compare_iwae=False))
        runs.append(str(run))
    return runs
