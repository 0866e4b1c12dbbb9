"""The densities on which the field compares samplers and evidence estimates (see `docs/posteriors.md`)."""

import csv
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mcvae.core.scores import LogDensity
from mcvae.data.registry import data_root
from mcvae.data.splits import DataError

__all__ = ["TARGETS", "Target", "load_target"]


class Target(NamedTuple):
    """An unnormalised log density."""

    log_joint: LogDensity
    """`[S, 1, D] -> [S, 1]`."""
    latent_dim: int
    """D."""
    log_evidence: float | None
    """Known, or estimated by long annealed importance sampling; None if it is not."""
    evidence_error: float = 0.0
    """Standard error of `log_evidence`."""


def load_target(name: str) -> Target:
    """One of `TARGETS`.

    >>> load_target("funnel").log_evidence
    0.0
    """
    return TARGETS[name]()


def _log_normal(x: Tensor, scale: float = 1.0) -> Tensor:
    return -0.5 * (x / scale).square() - math.log(scale) - 0.5 * math.log(2 * math.pi)


def _funnel() -> Target:
    """v ~ N(0, 9), nine others ~ N(0, e^v)."""

    def log_joint(z: Tensor) -> Tensor:
        v, others = z[..., 0], z[..., 1:]
        return _log_normal(v, 3.0) + (_log_normal(others * torch.exp(-0.5 * v).unsqueeze(-1))).sum(-1) - 4.5 * v

    return Target(log_joint, 10, 0.0)


def _banana() -> Target:
    """z_1 ~ N(0, 100) and z_2 + 0.02 (z_1² − 100) ~ N(0, 1)."""

    def log_joint(z: Tensor) -> Tensor:
        bent = z[..., 1] + 0.02 * (z[..., 0].square() - 100)
        return _log_normal(z[..., 0], 10.0) + _log_normal(bent)

    return Target(log_joint, 2, 0.0)


def _many_well() -> Target:
    """Sixteen double wells −a⁴ + 6a² + a/2 − b²/2: 2¹⁶ modes in 32 dimensions."""

    def log_joint(z: Tensor) -> Tensor:
        a, b = z[..., 0::2], z[..., 1::2]
        return (-a.pow(4) + 6 * a.square() + 0.5 * a - 0.5 * b.square()).sum(-1)

    return Target(log_joint, 32, 164.696)


def _mixture() -> Target:
    """Forty Gaussians of scale log(1 + e), with means uniform in [−40, 40]²."""
    generator = torch.Generator().manual_seed(0)
    means, scale = 80 * torch.rand(40, 2, generator=generator) - 40, math.log1p(math.e)

    def log_joint(z: Tensor) -> Tensor:
        return _log_normal(z.unsqueeze(-2) - means, scale).sum(-1).logsumexp(-1) - math.log(40)

    return Target(log_joint, 2, 0.0)


def _rows(name: str) -> list[list[str]]:
    path = data_root() / "posteriors" / f"{name}.csv"
    if not path.exists() and name in _SOURCES:
        import pooch

        url, checksum = _SOURCES[name]
        try:
            pooch.retrieve(url, checksum, fname=path.name, path=path.parent)
        except (OSError, ValueError) as error:  # no network, no such page; or another checksum than expected
            raise DataError(f"could not download {path}: {error}. Put the file there yourself, from {url}.") from error
    if not path.exists():
        raise DataError(f"expected {path}, which does not exist. Put the file there, or set MCVAE_DATA to the folder.")
    with path.open() as file:
        return [row for row in csv.reader(file) if row]


_SOURCES = {
    "ionosphere": (
        "https://archive.ics.uci.edu/ml/machine-learning-databases/ionosphere/ionosphere.data",
        "sha256:46d52186b84e20be52918adb93e8fb9926b34795ff7504c24350ae0616a04bbd",
    )
}
"""Address and checksum by name. Nobody publishes checksums of sonar and pines."""


def _logistic(x: Tensor, y: Tensor, log_evidence: float | None, error: float = 0.0) -> Target:
    """Logistic regression with weights and an intercept ~ N(0, 1); features are standardised."""
    x = x[:, x.std(0) > 0]
    design = torch.cat([torch.ones(len(x), 1), (x - x.mean(0)) / x.std(0)], 1)
    signed = (2 * y - 1).unsqueeze(1) * design

    def log_joint(z: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(z @ signed.T).sum(-1) + _log_normal(z).sum(-1)

    return Target(log_joint, design.shape[1], log_evidence, error)


def _classified(name: str) -> tuple[Tensor, Tensor]:
    rows = _rows(name)
    labels = sorted({row[-1] for row in rows})
    x = torch.tensor([[float(value) for value in row[:-1]] for row in rows])
    return x, torch.tensor([float(row[-1] == labels[1]) for row in rows])


def _breast_cancer() -> Target:
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    return _logistic(torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32), None)


def _cox_process() -> Target:
    """Pines on a 40 × 40 grid: counts ~ Poisson(exp(z) / 1600), z a Gaussian process; latents are whitened."""
    size, variance = 40, 1.91
    places = torch.tensor([[float(value) for value in row[1:]] for row in _rows("pines")[1:]])
    cells = (places * size).long().clamp(max=size - 1)
    counts = torch.bincount(cells[:, 0] * size + cells[:, 1], minlength=size * size).to(torch.float32)
    grid = torch.cartesian_prod(torch.arange(size), torch.arange(size)).double()
    covariance = variance * torch.exp(-torch.cdist(grid, grid) * 33 / size)
    factor = torch.linalg.cholesky(covariance).float()
    mean = math.log(126) - variance / 2

    def log_joint(z: Tensor) -> Tensor:
        log_rate = mean + z @ factor.T - math.log(size * size)
        likelihood = counts * log_rate - log_rate.exp() - torch.lgamma(counts + 1)
        value: Tensor = likelihood.sum(-1) + _log_normal(z).sum(-1)
        return value

    return Target(log_joint, size * size, None)


TARGETS: dict[str, Callable[[], Target]] = {
    "funnel": _funnel,
    "banana": _banana,
    "many-well": _many_well,
    "mixture-40": _mixture,
    "sonar": lambda: _logistic(*_classified("sonar"), -108.381, 0.009),
    "ionosphere": lambda: _logistic(*_classified("ionosphere"), -111.611, 0.007),
    "breast-cancer": _breast_cancer,
    "cox-process": _cox_process,
}
"""Densities by name. The evidence of sonar and ionosphere: annealed importance sampling, 3 × 1,000 chains."""
