"""The demonstration: a ring where chains win, digits where samples are enough. Resumes where it left off."""

from pathlib import Path

from mcvae.experiments.reproduction import ReproductionOptions, reproduce
from mcvae.runs.config import DataConfig, EvaluationSettings, RunConfig, TrainConfig
from mcvae.runs.method import parse_key
from mcvae.runs.results import read_result
from mcvae.training.evaluate_run import evaluate_run
from mcvae.training.run import train

__all__ = ["run_demo"]

RING_METHODS = ["vae", "iwae", "realnvp", "a-mcvae", "l-mcvae"]
DIGITS_METHODS = ("vae", "iwae-6", "l-mcvae-k5", "a-mcvae-k5")
"""The VAE, then three ways to spend six decoder passes per image."""
EVALUATION = EvaluationSettings(num_samples=16, compare_iwae=False)


def run_demo(folder: Path, epochs: int, seed: int) -> tuple[Path, Path]:
    """Fit the ring, then train and evaluate on digits; return the folders of both."""
    print(f"a ring: {', '.join(RING_METHODS)}", flush=True)
    ring = reproduce("toy-posterior", ReproductionOptions(seeds=1, methods=RING_METHODS), folder, command="mcvae demo")
    for key in DIGITS_METHODS:
        run = folder / "digits" / key
        if (run / "config.yaml").exists():
            train(resume=run)
        else:
            print(f"training {key} on digits, {epochs} epochs", flush=True)
            config = RunConfig(epochs=epochs, seed=seed, folder=str(run))
            train(TrainConfig(data=DataConfig("digits", batch_size=50), method=parse_key(key), run=config))
        if read_result(run).evaluation is None:
            print(f"evaluating {key} on test images", flush=True)
            evaluate_run(run, EVALUATION)
    return ring, folder / "digits"
