"""Pyro: the posterior of a model as a density of unconstrained latents."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal, Transform, biject_to

from mcvae._extras import needs_extra
from mcvae.core.bridge import Bridge

__all__ = ["PyroPosterior", "from_pyro"]


@dataclass(frozen=True, eq=False)
class _Site:
    """Where a latent of the model lies in a row of unconstrained numbers."""

    name: str
    start: int
    end: int
    shape: torch.Size
    transform: Transform

    def of(self, rows: Tensor) -> Tensor:
        """Its unconstrained numbers in rows `[..., D]`."""
        shape = self.transform.inverse_shape(self.shape)  # type: ignore[no-untyped-call]
        return rows[..., self.start : self.end].reshape((*rows.shape[:-1], *shape))


@dataclass(frozen=True, eq=False)
class PyroPosterior:
    """A Pyro model given its data, as `mcvae.estimate_log_evidence` and recipes take it.

    Args:
        log_joint: log p(data, z) of unconstrained latents with the transforms' Jacobians, `[S, 1, D] -> [S, 1]`.
        initial: where chains start: the guide's posterior, or one with the prior's median and scale, made wider.
        sites: the latents.
    """

    log_joint: Callable[[Tensor], Tensor]
    initial: Distribution
    sites: tuple[_Site, ...]

    def bridge(self) -> Bridge:
        """The bridge from `initial` to `log_joint`."""
        return Bridge(self.initial, self.log_joint)

    def constrained(self, z: Tensor) -> dict[str, Tensor]:
        """Samples `[N, 1, D]`, as of `Evidence.posterior`, as the model's own latents, `[N, ...]` by name."""
        return {site.name: site.transform(site.of(z[:, 0])) for site in self.sites}


def from_pyro(
    model: Callable[..., Any], *args: Any, guide: Any = None, num_draws: int = 1000, seed: int = 0, **kwargs: Any
) -> PyroPosterior:
    """The posterior of a Pyro model without discrete latents.

    Args:
        model: a Pyro model. Rows of latents are evaluated together by `torch.vmap` if the model does not branch on
            them; else one after the other, which is slow.
        args, kwargs: of the model: its data.
        guide: a trained guide of Pyro's autoguides with `get_posterior`, such as AutoMultivariateNormal; chains start
            there. Without one, chains start from a Gaussian with the median and 1.5 times the scale of prior draws.
        num_draws: of the prior, for that.
        seed: of those draws.

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model(x):
    ...     scale = pyro.sample("scale", dist.Gamma(2.0, 1.0))
    ...     pyro.sample("x", dist.Exponential(scale), obs=x)
    >>> posterior = from_pyro(model, torch.tensor(1.0))
    >>> posterior.log_joint(torch.zeros(3, 1, 1)).shape  # evidence: E[s exp(-s)] = 2 / 8
    torch.Size([3, 1])
    """
    with needs_extra("mcvae.adapters.from_pyro"):
        import pyro
        from pyro import poutine

    with torch.random.fork_rng(devices=[]), torch.no_grad(), pyro.poutine.block():
        torch.manual_seed(seed)
        sites = _sites(poutine.trace(model).get_trace(*args, **kwargs))
        draws = [_unconstrained(sites, poutine.trace(model).get_trace(*args, **kwargs)) for _ in range(num_draws)]

    def one(row: Tensor) -> Tensor:
        """log p(data, z) for one row `[D]`."""
        values, correction = dict[str, Tensor](), row.new_zeros(())
        for site in sites:
            part = site.of(row)
            values[site.name] = site.transform(part)
            jacobian = site.transform.log_abs_det_jacobian(part, values[site.name])  # type: ignore[no-untyped-call]
            correction = correction + jacobian.sum()
        with poutine.block():
            trace = poutine.trace(poutine.condition(model, data=values)).get_trace(*args, **kwargs)
        total: Tensor = trace.log_prob_sum() + correction
        return total

    evaluate: Callable[[Tensor], Tensor] = torch.vmap(one, randomness="different")
    with torch.no_grad(), pyro.validation_enabled(False):
        try:
            evaluate(torch.stack(draws[:2]))
        except RuntimeError:  # the model branches, or uses an operator that vmap does not know: a row at a time
            evaluate = partial(_row_by_row, one)

    def log_joint(z: Tensor) -> Tensor:
        with pyro.validation_enabled(False):  # checks branch on values, which vmap cannot; put back afterwards
            return evaluate(z.flatten(0, 1)).reshape(z.shape[:2])

    initial = _matched(torch.stack(draws)) if guide is None else _of_guide(guide, args, kwargs)
    return PyroPosterior(log_joint, initial, sites)


def _row_by_row(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    return torch.stack([function(row) for row in rows])


def _sites(trace: Any) -> tuple[_Site, ...]:
    found, end = list[_Site](), 0
    for name, node in trace.nodes.items():
        if node["type"] != "sample" or node["is_observed"] or type(node["fn"]).__name__ == "_Subsample":
            continue
        distribution = node["fn"]
        if distribution.support.is_discrete:
            raise ValueError(
                f"the Pyro model has the discrete latent {name!r}. Sum it out by hand, or condition on it: chains move "
                "in continuous space."
            )
        transform = biject_to(distribution.support)
        raw = transform.inv(node["value"])
        found.append(_Site(name, end, end + raw.numel(), node["value"].shape, transform))
        end += raw.numel()
    if not found:
        raise ValueError("the Pyro model has no latents: every sample statement is observed.")
    return tuple(found)


def _unconstrained(sites: tuple[_Site, ...], trace: Any) -> Tensor:
    """A draw as a row; refused if the support of a latent is not that of the first draw."""
    parts = list[Tensor]()
    for site in sites:
        node = trace.nodes[site.name]
        raw = site.transform.inv(node["value"])
        one = torch.ones_like(raw)
        if not torch.equal(biject_to(node["fn"].support)(one), site.transform(one)):
            raise ValueError(
                f"the support of the Pyro model's latent {site.name!r} depends on other latents, and chains need one "
                "that does not. Write it as a function of a latent with a fixed support: Uniform(0, a) as a times "
                "Uniform(0, 1)."
            )
        parts.append(raw.reshape(-1))
    return torch.cat(parts)


def _matched(draws: Tensor) -> Distribution:
    """A Gaussian with the median and 1.5 times the scale of the draws: too wide is better than too narrow.

    The scale is that of the middle half, since a heavy-tailed prior has draws without limit.
    """
    finite = draws[draws.isfinite().all(1)]
    low, middle, high = finite.quantile(torch.tensor([0.25, 0.5, 0.75]).to(finite), 0).unsqueeze(1)
    return Independent(Normal(middle, (1.5 * (high - low) / 1.349).clamp(min=1e-6)), 1)


def _of_guide(guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Distribution:
    if not callable(getattr(guide, "get_posterior", None)):
        raise TypeError(
            f"expected a guide with get_posterior, such as pyro.infer.autoguide.AutoMultivariateNormal, got "
            f"{type(guide).__name__}."
        )
    with torch.no_grad():
        found: Distribution = guide.get_posterior(*args, **kwargs)
        return found.expand((1,))  # type: ignore[no-any-return]
