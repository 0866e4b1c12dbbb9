"""mcvae train."""

from dataclasses import dataclass, fields

from mcvae.data import check_source
from mcvae.runs.config import TrainConfig, check
from mcvae.training.options import check_trainer

__all__ = ["Options", "run"]


@dataclass
class Options(TrainConfig):
    """What to train.

    Args:
        resume: run folder to continue; its config.yaml decides everything else.
    """

    resume: str | None = None


def run(options: Options) -> None:
    """Train a model: mcvae train --data mnist --method l-mcvae-sigmoid-k5."""
    config = TrainConfig(**{field.name: getattr(options, field.name) for field in fields(TrainConfig)})
    if options.resume is not None and config != TrainConfig():
        raise ValueError(
            f"--resume continues with the settings of {options.resume}/config.yaml; leave out all other options."
        )
    check(config)
    check_source(config.data.name)
    check_trainer(config.trainer)
    from mcvae.training.run import train

    train(config, resume=options.resume)
