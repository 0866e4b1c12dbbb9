"""What a run is, as plain data: read from YAML and the command line, written to `config.yaml`. Imports no torch."""

from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "DataConfig",
    "MethodConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Option",
    "RunConfig",
    "TrainConfig",
    "check",
    "default_folder",
    "resolve",
]


@dataclass
class DataConfig:
    """Which images, and how they are fed.

    Args:
        name: digits, mnist, fashion-mnist, omniglot, cifar10 or celeba.
        root: folder of the data sets; MCVAE_DATA, else a cache folder of the user, if not given.
        transform: what becomes of 8-bit pixels. auto: what the likelihood needs.
        validation: training images held out for validation; the data set's own choice if not given.
        limit: use only so many images of each split; all if not given.
        batch_size: images per optimiser step, over all devices.
    """

    name: str = "digits"
    root: str | None = None
    transform: Literal["auto", "binarize", "scale", "dequantize"] = "auto"
    validation: int | None = None
    limit: int | None = None
    batch_size: int = 100


@dataclass
class ModelConfig:
    """The networks and the likelihood.

    Args:
        network: conv is the paper's, small has half its layers. auto: mlp up to 16 x 16 pixels, conv above.
        latent_dim: dimension of the latents; 16 for digits, 64 for grey images, 128 for colour, if not given.
        likelihood: auto: bernoulli for grey images, gaussian with fixed sigma for colour, as in the paper.
        sigma: standard deviation of the gaussian likelihood, or where it starts if learned.
        flow: a normalising flow for q; none: mean-field Gaussian. auto: what the method needs.
    """

    network: Literal["auto", "conv", "small", "mlp"] = "auto"
    latent_dim: int | None = None
    likelihood: Literal["auto", "bernoulli", "gaussian", "gaussian-learned", "logistic"] = "auto"
    sigma: float = 1.0
    flow: Literal["auto", "none", "realnvp", "nsf"] = "auto"


@dataclass
class MethodConfig:
    """The bound that is trained on; `mcvae methods` lists them.

    Args:
        name: vae, iwae, l-mcvae, a-mcvae, uha or realnvp.
        num_steps: Monte Carlo steps K (l-mcvae, a-mcvae, uha).
        num_samples: chains or importance samples per image; 10 for iwae, 5 for a-mcvae, else 1, if not given.
        schedule: temperatures of the steps.
        step_size: where step sizes start, or what they are if fixed.
        step_sizes: the paper's adaptive rule (adaptive), learned through the bound, or fixed.
    """

    name: str = "l-mcvae"
    num_steps: int = 5
    num_samples: int | None = None
    schedule: Literal["linear", "sigmoid", "learned"] = "linear"
    step_size: float = 0.01
    step_sizes: Literal["adaptive", "learned", "fixed"] = "adaptive"


@dataclass
class OptimizerConfig:
    """Adam with a step schedule and gradient clipping, the same for every method.

    Args:
        learning_rate: of Adam.
        milestones: fractions of training after which the learning rate is multiplied by decay.
        decay: see milestones.
        clip: largest norm of the gradient; larger ones are scaled down. 0: no clipping.
        patience: stop with advice after so many non-finite steps in a row.
    """

    learning_rate: float = 1e-3
    milestones: list[float] = field(default_factory=lambda: [0.6, 0.85])
    decay: float = 0.3
    clip: float = 100.0
    patience: int = 20


@dataclass
class RunConfig:
    """How long, where to, and what to record.

    Args:
        epochs: passes over the training images.
        seed: of everything random. The same seed gives the same run, bit for bit.
        folder: run folder; a name like runs/mnist-l-mcvae-k5-sigmoid-s0 if not given.
        snapshots: epochs after which the weights are kept in epochs/, for `mcvae evaluate --epoch`.
        likelihood_every: epochs between AIS-HMC likelihoods of validation images; 0: never.
        pictures_every: epochs between sample and reconstruction pictures; 0: only at the end.
        log_every: optimiser steps between TensorBoard points.
        memory: low computes every state of a chain again in the backward pass, for long chains.
        compile: let torch.compile build the model's value and score; see the guide on performance.
    """

    epochs: int = 10
    seed: int = 0
    folder: str | None = None
    snapshots: list[int] = field(default_factory=list)
    likelihood_every: int = 0
    pictures_every: int = 0
    log_every: int = 50
    memory: Literal["normal", "low"] = "normal"
    compile: bool = False


Option = bool | int | float | str | list[int] | None
"""What an option of Lightning's Trainer may be: not Any, for which the parser imports what a file names."""


@dataclass
class TrainConfig:
    """Everything that `config.yaml` holds."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    trainer: dict[str, Option] = field(default_factory=dict)


def default_folder(config: TrainConfig) -> str:
    """A name that says what the run is.

    >>> default_folder(TrainConfig(method=MethodConfig("iwae", num_samples=50)))
    'runs/digits-iwae-n50-s0'
    """
    method = config.method
    parts = [config.data.name, method.name]
    if method.name in ("l-mcvae", "a-mcvae", "uha"):
        parts += [f"k{method.num_steps}", *([method.schedule] if method.schedule != "linear" else [])]
    if method.num_samples is not None:
        parts.append(f"n{method.num_samples}")
    return "runs/" + "-".join([*parts, f"s{config.run.seed}"])


def check(config: TrainConfig) -> None:
    """Raise a ValueError that names the option, for numbers that make no sense."""
    least = {
        "data.batch_size": (config.data.batch_size, 1),
        "data.validation": (config.data.validation, 0),
        "data.limit": (config.data.limit, 1),
        "model.latent_dim": (config.model.latent_dim, 1),
        "method.num_steps": (config.method.num_steps, 0),
        "method.num_samples": (config.method.num_samples, 1),
        "optimizer.clip": (config.optimizer.clip, 0),
        "optimizer.patience": (config.optimizer.patience, 1),
        "run.epochs": (config.run.epochs, 1),
        "run.likelihood_every": (config.run.likelihood_every, 0),
        "run.pictures_every": (config.run.pictures_every, 0),
        "run.log_every": (config.run.log_every, 1),
    }
    for name, (value, smallest) in least.items():
        if value is not None and value < smallest:
            raise ValueError(f"--{name} must be at least {smallest}, got {value}.")
    if any(not 1 <= epoch <= config.run.epochs for epoch in config.run.snapshots):
        raise ValueError(
            f"--run.snapshots must lie between 1 and --run.epochs {config.run.epochs}, got {config.run.snapshots}."
        )
    for name, number in {
        "model.sigma": config.model.sigma,
        "method.step_size": config.method.step_size,
        "optimizer.learning_rate": config.optimizer.learning_rate,
    }.items():
        if not number > 0:
            raise ValueError(f"--{name} must be positive, got {number}.")


def resolve(config: TrainConfig, shape: tuple[int, int, int], needs_flow: str | None) -> TrainConfig:
    """Replace every "auto" and None that depends on the data or the method: `config.yaml` says what was done."""
    grey, tiny = shape[0] == 1, max(shape[1:]) <= 16
    model, data = config.model, config.data
    if model.network == "auto":
        model.network = "mlp" if tiny else "conv"
    if model.latent_dim is None:
        model.latent_dim = 16 if tiny else 64 if grey else 128
    if model.likelihood == "auto":
        model.likelihood = "bernoulli" if grey else "gaussian"
    if model.flow == "auto":
        model.flow = needs_flow or "none"  # type: ignore[assignment]
    if data.transform == "auto":
        transforms = {"bernoulli": "binarize", "logistic": "scale", "gaussian": "scale"}
        data.transform = transforms.get(model.likelihood, "dequantize")  # type: ignore[assignment]
    return config
