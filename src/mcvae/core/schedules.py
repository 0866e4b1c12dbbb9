"""Annealing schedules: the temperatures β_1 ≤ … ≤ β_K of the K moves (Section 4.1).

End points are exact by construction. With `interior=False` the last move happens at β_K = 1 (t_k = k/K), as the paper
has it for SIS; with `interior=True` all moves happen strictly between the end points (t_k = k/(K+1)). AIS should use
the latter: a move that leaves p invariant does not enter the weight, so one at β_K = 1 would be wasted.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["FixedSchedule", "LearnedSchedule", "LinearSchedule", "Schedule", "SigmoidSchedule"]


class Schedule(nn.Module, ABC):
    """Temperatures of K moves."""

    num_steps: int

    def __init__(self, num_steps: int):
        super().__init__()
        if index(num_steps) < 0:
            raise ValueError(f"the number of steps K must not be negative, got {num_steps}; K = 0 is plain sampling.")
        self.num_steps = num_steps

    @abstractmethod
    def forward(self) -> Tensor:
        """Temperatures `[K]`, non-decreasing in [0, 1]."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call `forward`."""
        betas: Tensor = super().__call__(*args, **kwargs)
        return betas

    def extra_repr(self) -> str:
        """Show the settings in `repr`."""
        return f"num_steps={self.num_steps}"


class FixedSchedule(Schedule):
    """Temperatures given by hand, or frozen after a pilot.

    >>> FixedSchedule([0.1, 0.5])()
    tensor([0.1000, 0.5000])
    """

    betas: Tensor

    def __init__(self, betas: Tensor | Sequence[float]):
        values = betas if isinstance(betas, Tensor) else torch.tensor(betas, dtype=torch.get_default_dtype())
        if values.dim() != 1:
            raise ValueError(f"a schedule needs temperatures of shape [K], got {list(values.shape)}.")
        super().__init__(len(values))
        ladder = torch.cat([values.new_zeros(1), values]).diff()
        if not (bool((ladder > 0).all()) and bool((values <= 1).all())):
            raise ValueError(
                f"a schedule needs strictly increasing temperatures 0 < beta_1 < ... < beta_K <= 1, got "
                f"{values.tolist()}. Sort them, and leave out 0: it is where the chain starts."
            )
        self.register_buffer("betas", values)

    def forward(self) -> Tensor:
        """See `Schedule`."""
        return self.betas


class LinearSchedule(Schedule):
    """Regularly spaced temperatures, the paper's fixed schedule.

    >>> LinearSchedule(2)(), LinearSchedule(1, interior=True)()
    (tensor([0.5000, 1.0000]), tensor([0.5000]))
    """

    betas: Tensor

    def __init__(self, num_steps: int, *, interior: bool = False):
        super().__init__(num_steps)
        self.register_buffer("betas", _grid(num_steps, interior))

    def forward(self) -> Tensor:
        """See `Schedule`."""
        return self.betas


class SigmoidSchedule(Schedule):
    """β(t) = (σ(δ(2t − 1)) − σ(−δ)) / (σ(δ) − σ(−δ)) with learned δ > 0 (Grosse et al., 2015).

    Normalised at t = 0, so that β_0 = 0 (the paper's text normalises at its first step).

    Args:
        num_steps: K.
        delta: initial δ; small is nearly linear, large lingers at both ends. 4 is the choice of Grosse et al.
        interior: see the module's text.

    >>> SigmoidSchedule(3, interior=True)().detach()
    tensor([0.1050, 0.5000, 0.8950])
    """

    grid: Tensor

    def __init__(self, num_steps: int, delta: float = 4.0, *, interior: bool = False):
        super().__init__(num_steps)
        if delta <= 0:
            raise ValueError(f"delta must be positive, got {delta}.")
        self.log_delta = nn.Parameter(torch.tensor(delta, dtype=torch.get_default_dtype()).log())
        self.register_buffer("grid", _grid(num_steps, interior))

    def forward(self) -> Tensor:
        """See `Schedule`."""
        half = 0.5 * self.log_delta.exp()
        # sigma(x) = (1 + tanh(x / 2)) / 2: the same curve, with end points that are exact in floating point
        return 0.5 * (1 + torch.tanh(half * (2 * self.grid - 1)) / torch.tanh(half))


class LearnedSchedule(Schedule):
    """All temperatures learned: increments are a softmax, hence positive, with sum 1.

    >>> LearnedSchedule(2)().detach()
    tensor([0.5000, 1.0000])
    """

    def __init__(self, num_steps: int, *, interior: bool = False):
        super().__init__(num_steps)
        self.interior = interior
        self.logits = nn.Parameter(torch.zeros(num_steps + interior))

    def forward(self) -> Tensor:
        """See `Schedule`."""
        betas = self.logits.softmax(0).cumsum(0).clamp(max=1.0)
        if self.interior:
            return betas[:-1]
        return torch.cat([betas[:-1], torch.ones_like(betas[-1:])])  # exactly 1, whatever the rounding of the sum


def _grid(num_steps: int, interior: bool) -> Tensor:
    """t_k for k = 1..K."""
    return torch.arange(1, num_steps + 1, dtype=torch.get_default_dtype()) / max(num_steps + interior, 1)
