"""Every setting of training and evaluation, as dataclasses: the command line and `config.yaml` are made from them."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mcvae.runs.method import MethodConfig
from mcvae.runs.naming import check_range

__all__ = [
    "MOST_STEPS",
    "DataConfig",
    "EvaluationSettings",
    "ModelConfig",
    "OptimizerConfig",
    "Option",
    "RunConfig",
    "TrainConfig",
]

MOST_STEPS = 100_000
"""The longest chain that is accepted; longer ones only exhaust the memory."""


@dataclass
class DataConfig:
    """Which data to use, how to split and transform them.

    Args:
        name: digits, mnist, fashion-mnist, omniglot, cifar10 or celeba; or the path of your own: a folder of images, or
            a file that ends in .npy, .npz, .pt, .csv, .tsv, .parquet or .h5ad.
        root: folder of the data sets; MCVAE_DATA, else a cache folder of the user, if not given.
        transform: of 8-bit pixels, counts or real numbers. auto: the one that the likelihood needs.
        validation: training data held out for validation; the data set's own choice, or a tenth, if not given.
        test: your own data held out for testing, where they are not split already; a tenth if not given.
        split_seed: of that split; apart from --run.seed, so that runs with other seeds have the same split.
        size: resize and crop the images of a folder to this height and width.
        kind: what the values of your own data are. auto: bytes are pixels, whole numbers from 0 counts, others real.
        condition: columns, arrays, or folder (that an image is in), to condition on instead of modelling them, such as
            [label].
        fingerprint: of your own data, written when training starts; data that have changed since are refused.
        limit: use at most this many images of each split; all if not given.
        batch_size: images per optimiser step, over all devices.
    """

    name: str = "digits"
    root: str | None = None
    transform: Literal["auto", "binarize", "scale", "dequantize", "keep", "standardize"] = "auto"
    validation: int | None = None
    test: int | None = None
    split_seed: int = 0
    size: int | None = None
    kind: Literal["auto", "pixels", "counts", "real"] = "auto"
    condition: list[str] = field(default_factory=list)
    fingerprint: str | None = None
    limit: int | None = None
    batch_size: int = 100


@dataclass
class ModelConfig:
    """The networks and the likelihood.

    Args:
        network: conv is the paper's, small has half its layers. auto: mlp for vectors and up to 16 x 16 pixels, conv
            above.
        latent_dim: dimension of the latents; 16 for digits, 64 for grey images, 128 for colour, half the columns of a
            table but at most 16, if not given.
        likelihood: bernoulli, gaussian, gaussian-learned, gaussian-per-dimension, logistic, categorical, poisson,
            negative-binomial or student-t. auto: bernoulli for grey images and binary data, gaussian with fixed sigma
            for colour, as in the paper; negative-binomial for counts, gaussian-per-dimension for real data.
        sigma: standard deviation of the gaussian likelihood, or where it starts if learned.
        flow: a normalising flow for q; none: mean-field Gaussian. auto: what the method needs.
        encoder: linear, for a weak one with a single layer; or a network of your own as module:Class, called with
            (shape, latent_dim), from data to 2 latent_dim numbers or to a distribution. A run folder may not import
            it: see the guide on your own data.
        decoder: network of your own as module:Class, called with (shape of its output, number of its inputs).
        prior: standard-normal, or learned: mixture of Gaussians, vamp (of q at pseudo-data), realnvp or nsf (flows).
        prior_components: of mixture and vamp.
    """

    network: Literal["auto", "conv", "small", "mlp"] = "auto"
    latent_dim: int | None = None
    likelihood: str = "auto"
    sigma: float = 1.0
    flow: Literal["auto", "none", "realnvp", "nsf"] = "auto"
    encoder: str | None = None
    decoder: str | None = None
    prior: Literal["standard-normal", "mixture", "vamp", "realnvp", "nsf"] = "standard-normal"
    prior_components: int = 10


@dataclass
class OptimizerConfig:
    """The optimiser, its schedule and gradient clipping, the same for every method.

    Args:
        name: of the optimiser.
        settings: of the optimiser, as torch names them, such as {weight_decay: 0.01, betas: [0.9, 0.99]}.
        learning_rate: of the optimiser.
        schedule: steps, see milestones; cosine, to 0 at the end; or constant.
        warmup: epochs over which the learning rate rises from almost 0.
        milestones: fractions of training after which the learning rate is multiplied by decay.
        decay: see milestones.
        kl_warmup: epochs over which the weight of the KL divergence rises to 1 (β-annealing).
        average: decay of an exponential average of the weights, such as 0.999, which is validated and saved instead of
            the last; 0: none.
        clip: largest norm of the gradient; larger ones are scaled down. 0: no clipping.
        patience: stop with advice after this many non-finite steps in a row.
    """

    name: Literal["adam", "adamw", "adamax", "nadam", "radam", "rmsprop", "sgd"] = "adam"
    settings: dict[str, bool | float | list[float]] = field(default_factory=dict)
    learning_rate: float = 1e-3
    schedule: Literal["steps", "cosine", "constant"] = "steps"
    warmup: int = 0
    milestones: list[float] = field(default_factory=lambda: [0.6, 0.85])
    decay: float = 0.3
    kl_warmup: int = 0
    average: float = 0.0
    clip: float = 100.0
    patience: int = 20


@dataclass
class RunConfig:
    """How long to train, where to write, and what to record.

    Args:
        epochs: passes over the training images.
        seed: of everything random. The same seed gives the same run, bit for bit.
        folder: run folder; a name like runs/mnist-l-mcvae-k5-sigmoid-s0 if not given.
        patience: stop when the validation bound has not risen for this many epochs, and keep the best weights; 0 for
            never.
        keep: the weights of the last epoch, or of the best validation bound.
        logger: where to write curves, besides metrics.csv; wandb and mlflow need the extras of these names.
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
    patience: int = 0
    keep: Literal["last", "best"] = "last"
    logger: Literal["tensorboard", "csv", "wandb", "mlflow"] = "tensorboard"
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
    """Everything that `config.yaml` holds.

    Args:
        data: the images.
        model: networks and likelihood.
        method: the bound to train on.
        optimizer: the optimiser.
        run: length, seed, folder.
        trainer: options of Lightning's Trainer, such as --trainer.devices 2 --trainer.strategy ddp.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    trainer: dict[str, Option] = field(default_factory=dict)


@dataclass
class EvaluationSettings:
    """How a run is evaluated. Settings that are not given are those of the protocol.

    Args:
        split: test or validation.
        protocol: thorough, or the paper's (5 temperatures, 10 chains); what follows replaces parts of it.
        num_steps: temperatures of AIS-HMC; auto doubles them until the estimate settles.
        num_samples: chains of AIS-HMC per image.
        start: where chains start: fitted, a Gaussian near each posterior if that is shorter; q(z|x); or p(z).
        spacing: of the temperatures.
        tolerance: in nats, for auto and for verdicts.
        max_steps: most temperatures that auto may take.
        limit: evaluate at most this many images, evenly spaced in the split.
        simulated: images to simulate from the model for bounds from both sides; 0 for none.
        compare_iwae: also estimate by importance sampling at equal cost, which doubles the time.
        tuning: tuning.json of another evaluation, instead of a pilot.
        memory: for activations, such as 500MB or 4GB.
        device: such as cpu or cuda.
        seed: that of the run if not given.
        epoch: evaluate the weights after this epoch, one of --run.snapshots, instead of the last.
        processes: share the batches among this many processes of this machine; with --device cuda each takes one GPU.
    """

    split: Literal["test", "validation"] = "test"
    protocol: Literal["thorough", "paper"] = "thorough"
    num_steps: int | Literal["auto"] | None = None
    num_samples: int | None = None
    start: Literal["fitted", "encoder", "prior"] | None = None
    spacing: Literal["adaptive", "sigmoid", "linear"] | None = None
    tolerance: float | None = None
    max_steps: int | None = None
    limit: int | None = None
    simulated: int = 32
    compare_iwae: bool = True
    tuning: str | None = None
    memory: str = "1GB"
    device: str = "cpu"
    seed: int | None = None
    epoch: int | None = None
    processes: int = 1

    def check(self) -> None:
        """Raise a ValueError that names the option, for values that make no sense."""
        steps = None if self.num_steps == "auto" else self.num_steps
        check_range("num_steps", steps, 0, MOST_STEPS)
        check_range("num_samples", self.num_samples, 1, 1_000_000)
        check_range("max_steps", self.max_steps, 1, MOST_STEPS)
        check_range("tolerance", self.tolerance, 1e-9, 1e9)
        check_range("limit", self.limit, 2, None, ": a standard error needs two images")
        check_range("simulated", self.simulated, 0, 100_000)
        check_range("epoch", self.epoch, 1)
        check_range("processes", self.processes, 1, 1024)
        self.bytes()
        if self.tuning is not None and not Path(self.tuning).is_file():
            raise ValueError(f"--tuning {self.tuning} is not a file; give the tuning.json of an evaluated run.")

    def bytes(self) -> float:
        """The memory in bytes.

        >>> EvaluationSettings(memory="500MB").bytes()
        500000000.0
        """
        units = {"KB": 1e3, "MB": 1e6, "GB": 1e9}
        try:
            amount = float(self.memory[:-2]) * units[self.memory[-2:].upper()]
        except (KeyError, ValueError):
            amount = 0.0
        if not 0 < amount < 1e15:
            raise ValueError(f"--memory must look like 500MB or 4GB, got {self.memory!r}.")
        return amount

    def identity(self) -> dict[str, Any]:
        """The given settings that affect the numbers: evaluations that agree in them are comparable."""
        where = ("memory", "device", "processes", "epoch", "split", "simulated", "compare_iwae")
        plain = asdict(EvaluationSettings())
        return {name: value for name, value in asdict(self).items() if name not in where and value != plain.get(name)}
