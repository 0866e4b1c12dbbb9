"""The demonstration: four methods, one budget, one table. Goes on where it was interrupted."""

from pathlib import Path

from mcvae.training.config import DataConfig, MethodConfig, RunConfig, TrainConfig
from mcvae.training.evaluation import evaluate_run
from mcvae.training.files import read_json
from mcvae.training.run import train

__all__ = ["run_demo"]

METHODS = {
    "vae": MethodConfig("vae"),
    "iwae": MethodConfig("iwae", num_samples=10),
    "l-mcvae": MethodConfig("l-mcvae", num_steps=5),
    "a-mcvae": MethodConfig("a-mcvae", num_steps=5, num_samples=3),
}


def run_demo(folder: str, epochs: int, seed: int) -> list[str]:
    """Train, evaluate and return the run folders."""
    if "://" in folder:
        raise ValueError(f"--folder must be a folder of this machine, got {folder}.")
    runs = []
    for name, method in METHODS.items():
        run = Path(folder) / name
        if (run / "config.yaml").exists():
            train(resume=run)
        else:
            print(f"training {name} on digits, {epochs} epochs", flush=True)
            config = RunConfig(epochs=epochs, seed=seed, folder=str(run))
            train(TrainConfig(data=DataConfig("digits", batch_size=50), method=method, run=config))
        if "evaluation" not in read_json(run / "result.json"):
            print(f"evaluating {name} on test images", flush=True)
            evaluate_run(run, num_samples=16, compare_iwae=False)
        runs.append(str(run))
    return runs
