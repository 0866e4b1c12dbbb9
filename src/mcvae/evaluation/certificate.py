"""How much bias may remain in the mean log-likelihood of a set, and whether that is below the tolerance."""

import math
from typing import Any, NamedTuple

from torch import Tensor

from mcvae.core.verdict import verdict

__all__ = ["Certificate"]

Figure = tuple[float, float]
"""A mean over data, and its standard error; NaN if it is not known."""


class Certificate(NamedTuple):
    """Three views of how much too low the mean of log p̂ may be, in nats.

    >>> import torch
    >>> small = Certificate.of(torch.full((8,), 0.01), torch.zeros(8), {"gap": 0.02, "gap_se": 0.01})
    >>> small.verdict([()] * 8, 0.1)
    'converged, certified within 0.1 nat'
    """

    bias: Figure
    """Jackknife of log p̂ over chains: what more chains would add."""
    moved: Figure
    """What doubling the temperatures added on pilot data."""
    gap: Figure
    """Upper minus lower bound on data that the model simulates."""

    @classmethod
    def of(cls, bias: Tensor, moved: Tensor, sandwich: dict[str, Any] | None) -> "Certificate":
        """From values for every datum, `[N]`, and the bounds on simulated data."""
        gap = (math.nan, math.nan) if sandwich is None else (sandwich["gap"], sandwich["gap_se"])
        return cls(_figure(bias), _figure(moved), gap)

    @property
    def remaining(self) -> float:
        """The largest of what the views allow, two standard errors included; NaN if none is known."""
        allowed = [mean + 2 * error for mean, error in self if not math.isnan(mean)]
        return max(allowed) if allowed else math.nan

    def verdict(self, doubts: list[tuple[str, ...]], tolerance: float) -> str:
        """One sentence on the set.

        Up to five doubtful data in a hundred do not spoil the mean, nor does the noise of single data, which the views
        contain. A view contradicts only if it exceeds the tolerance by more than its own noise. Only bounds from both
        sides can confirm, since nothing else is independent of the estimate.
        """
        doubts = [tuple(name for name in found if name != "noisy") for found in doubts]
        reasons = {
            "its chains are too few": self.bias,
            "more temperatures still change it": self.moved,
            "bounds on simulated data lie apart": self.gap,
        }
        beyond = [f"{reason} ({m:.2f} ± {e:.2f} nat)" for reason, (m, e) in reasons.items() if m - 2 * e > tolerance]
        unsure = sum(bool(found) for found in doubts)
        if beyond:
            return f"not converged, because {', and '.join(beyond)}: raise max_steps, or num_samples"
        if unsure > 0.05 * len(doubts):
            return verdict(doubts)
        but = f", except {unsure} of {len(doubts)} data" if unsure else ""
        if math.isnan(self.gap[0]):
            return f"no contradiction found{but}; bounds from both sides (simulated) could confirm it"
        if self.remaining <= tolerance:
            return f"converged, certified within {tolerance:g} nat{but}"
        if self.remaining <= _USEFUL * tolerance:
            return f"converged{but}; certified within {self.remaining:.2f} nat, not {tolerance:g}"
        allowed = f"{self.remaining:.2f} nat: raise simulated, or num_steps"
        return f"no contradiction found{but}, but the bounds allow {allowed}"


_USEFUL = 5
"""How many tolerances may remain where a set is called "converged": beyond, noise may hide a contradiction."""


def _figure(values: Tensor) -> Figure:
    """Mean and standard error of the known values; infinite if one of them is."""
    known = values[~values.isnan()].double()
    if not len(known):
        return math.nan, math.nan
    if bool(known.isinf().any()):
        return math.inf, 0.0
    return known.mean().item(), (known.std() / len(known) ** 0.5).item() if len(known) > 1 else 0.0
