"""The initial distribution, from which chains start: what it must be, and where and how wide it is."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

__all__ = ["centre", "check_initial", "name_of", "standard_deviation"]


def centre(initial: Distribution) -> Tensor:
    """The mean of an initial distribution, `[B, D]`; the median of samples for flows and heavy tails."""
    mean = _if_finite(lambda: initial.mean)
    return _samples(initial).median(0).values.detach() if mean is None else mean.detach()


def standard_deviation(initial: Distribution) -> Tensor:
    """Scales of an initial distribution, `[B, D]`; by quantiles of samples for flows and heavy tails."""
    scale = _if_finite(lambda: initial.stddev)
    if scale is not None:
        return scale
    samples = _samples(initial)
    low, high = samples.quantile(samples.new_tensor([0.1587, 0.8413]), 0)  # of a Gaussian, one deviation off its mean
    width: Tensor = high - low
    return width / 2


def _if_finite(moment: Callable[[], Tensor]) -> Tensor | None:
    """A moment, or None if the distribution does not know it, or has none."""
    try:
        value = moment()
    except NotImplementedError:
        return None
    return value if bool(value.isfinite().all()) else None


def _samples(initial: Distribution) -> Tensor:
    """The same 200 samples at every call, whatever else is random, with their gradient if they have one."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return (initial.rsample if initial.has_rsample else initial.sample)(torch.Size([200]))


def check_initial(initial: Distribution) -> None:
    """Refuse an initial distribution that chains cannot start from, and say what to do."""
    if not isinstance(initial, Distribution):
        raise TypeError(
            "the initial distribution must be a torch.distributions.Distribution, which can be sampled and has a "
            f"normalised log_prob; got {type(initial).__name__}. An unnormalised density belongs in log_joint."
        )
    batch, event = list(initial.batch_shape), list(initial.event_shape)
    if len(batch) != 1 or len(event) != 1:
        advice = (
            "Wrap it: torch.distributions.Independent(distribution, 1)."
            if len(batch) == 2 and not event
            else "Give it a batch of one: distribution.expand((1,))."
            if not batch
            else "Flatten the latent to one dimension."
        )
        raise ValueError(
            "the initial distribution must have batch shape [B] and event shape [D], got "
            f"batch {batch} and event {event} from {name_of(initial)}. {advice}"
        )
    try:
        support = initial.support
    except NotImplementedError:  # some flows do not say; they are continuous
        return
    if support is not None and support.is_discrete:
        raise ValueError(
            f"the initial distribution must be continuous, got {name_of(initial)} with discrete support: Langevin and "
            "Hamiltonian moves need a density on R^D. Marginalise the discrete latents, or relax them."
        )
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if isinstance(support, _BOUNDED):
        raise ValueError(
            f"the initial distribution must be positive on all of R^D, got {name_of(initial)} with support {support}. "
            "Change variables: let latents be the logarithm (or logit) and add the log Jacobian to log_joint."
        )


_BOUNDED = (
    type(constraints.simplex),
    type(constraints.positive),
    type(constraints.nonnegative),
    type(constraints.unit_interval),
    constraints.half_open_interval,
    constraints.less_than,
)


def name_of(distribution: Distribution) -> str:
    """The name of a distribution, with that of its base."""
    base = getattr(distribution, "base_dist", None)
    name = type(distribution).__name__
    return f"{name}({type(base).__name__})" if isinstance(base, Distribution) else name
