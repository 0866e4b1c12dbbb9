"""Optional packages: `pip install mcvae` brings torch and little else; an error names the extra that is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["EXTRAS", "MissingExtraError", "needs_extra"]

EXTRAS = {
    "train": (
        "filelock",
        "fsspec",
        "jsonargparse",
        "lightning",
        "PIL",
        "pooch",
        "rich",
        "safetensors",
        "sklearn",
        "tensorboard",
        "yaml",
        "zuko",
    ),
    "report": ("jinja2", "markupsafe", "matplotlib"),
    "cluster": ("ray",),
    "parquet": ("pyarrow",),
    "h5ad": ("h5py",),
    "pyro": ("pyro",),
    "arviz": ("arviz",),
    "scvi": ("scvi",),
    "pythae": ("pythae",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}
"""Modules that each extra of `pyproject.toml` brings."""


class MissingExtraError(ImportError):
    """A package is not installed; the message names the extra that brings it."""


@contextmanager
def needs_extra(user: str) -> Iterator[None]:
    """Turn a failed import of an optional package into advice.

    Args:
        user: what needs the package; the subject of the error message.

    >>> with needs_extra("mcvae train"):
    ...     raise ModuleNotFoundError("No module named 'lightning'", name="lightning")
    Traceback (most recent call last):
        ...
    mcvae._extras.MissingExtraError: mcvae train needs the extra 'train': pip install 'mcvae[train]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        for extra, packages in EXTRAS.items():
            if package in packages:
                raise MissingExtraError(
                    f"{user} needs the extra {extra!r}: pip install 'mcvae[{extra}]'", name=error.name
                ) from error
        raise
