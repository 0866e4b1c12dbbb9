"""How a set is evaluated, and the columns of what is found."""

from dataclasses import dataclass
from typing import Literal

from mcvae.core.tuning import Spacing

__all__ = ["COLUMNS", "PROTOCOLS", "WEIGHT_EDGES", "Protocol"]


@dataclass(frozen=True)
class Protocol:
    """How log p(x) is estimated.

    Args:
        num_steps: temperatures K, or "auto": doubled on pilot data until the estimate moves by less than `tolerance`.
        num_samples: chains per datum.
        start: "fitted", the Gaussian nearest to each datum's own posterior, if pilot chains from there are
            shorter than from the encoder; "encoder", q(z | x); or "prior", which a bad encoder cannot spoil but which
            needs more temperatures.
        spacing: of the temperatures.
        tolerance: in nats, for "auto" and for verdicts.
        max_steps: budget of "auto".
    """

    num_steps: int | Literal["auto"] = "auto"
    num_samples: int = 64
    start: Literal["fitted", "encoder", "prior"] = "fitted"
    spacing: Spacing = "adaptive"
    tolerance: float = 0.1
    max_steps: int = 1024


PROTOCOLS = {"thorough": Protocol(), "paper": Protocol(num_steps=5, num_samples=10, start="encoder", spacing="linear")}
"""The default, and what the paper reports: five HMC moves of three leapfrogs from the encoder (Section 4.3)."""

COLUMNS = (
    "image",
    "log_likelihood",
    "standard_error",
    "bias",
    "ess",
    "pareto_k",
    "acceptance",
    "nonfinite",
    "bound",
    "importance",
    "iwae_10",
    "rate",
    "distortion",
    "doubts",
)
"""Of the table: the keys of `Evaluation.table`, a row per datum."""


WEIGHT_EDGES = [-6.0 + 0.5 * edge for edge in range(21)]
"""Of the histogram of log w − log mean w over all chains and data, in nats; the outer bins also hold what is beyond."""
