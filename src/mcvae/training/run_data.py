"""The data of a run: loaded, checked against those it was trained on, and cut into batches. Imports no Lightning."""

from pathlib import Path

from mcvae.data import Batches, DataError, Splits, load_data
from mcvae.data.registry import is_own
from mcvae.runs.config import TrainConfig, check, resolve
from mcvae.training.options import check_trainer

__all__ = ["batches", "prepare"]


def batches(
    images: Splits, config: TrainConfig, split: str, *, epoch: int | None = None, rank: int = 0, ranks: int = 1
) -> Batches:
    """Batches of a split, transformed as the configuration says."""
    limit, given = config.data.limit, images.given_of(split)
    return Batches(
        images.split(split)[:limit],
        config.data.batch_size,
        images.transform(config.data.transform),
        seed=config.run.seed,
        epoch=epoch,
        rank=rank,
        world_size=ranks,
        given=None if given is None else given[:limit],
    )


def prepare(config: TrainConfig, *, trusted: bool = True) -> tuple[TrainConfig, Splits]:
    """Load the data and replace every "auto" of the configuration.

    A configuration that is not trusted may come from others: nothing is downloaded to the folder that it names.
    """
    check(config)
    check_trainer(config.trainer)
    wanted = config.data
    if is_own(wanted.name):
        wanted.name = str(Path(wanted.name).expanduser().absolute())  # the run is used from elsewhere, too
    images = load_data(
        wanted.name,
        wanted.root,
        validation=wanted.validation,
        test=wanted.test,
        size=wanted.size,
        kind=wanted.kind,
        split_seed=wanted.split_seed,
        condition=wanted.condition,
        download=trusted or wanted.root is None,
    )
    found = images.fingerprint() if is_own(wanted.name) or images.note else None
    if wanted.fingerprint is not None and wanted.fingerprint != found:
        raise DataError(
            f"{wanted.name} has changed since the run was trained: its rows would be split otherwise, and the test set "
            "would hold what was trained on. Restore the data, or train again."
        )
    wanted.fingerprint = found
    return resolve(config, images.shape, images.kind, images.levels), images
