"""Step sizes of the K moves: fixed, learned, adapted (Section 4.1), or in units of the initial distribution's scales.

Adapted step sizes are buffers. `forward` never changes them and `update` is the only thing that does, so evaluating a
model leaves it as it was and a checkpoint holds everything.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from operator import index
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from mcvae.core.annealing import Trajectory
from mcvae.core.initials import standard_deviation

__all__ = [
    "AcceptanceAdapted",
    "FixedStepSizes",
    "LearnedStepSizes",
    "RelativeStepSizes",
    "ScoreScaled",
    "StepSizes",
]


class StepSizes(nn.Module, ABC):
    """Step sizes `[K]`, `[K, D]` for the preconditioned form, or `[K, B, D]` for one per datum."""

    num_steps: int
    """K."""

    @abstractmethod
    def forward(self, initial: Distribution | None = None) -> Tensor:
        """Step sizes `[K]`, `[K, D]` or `[K, B, D]`, positive; they may depend on where chains start."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call `forward`."""
        values: Tensor = super().__call__(*args, **kwargs)
        return values

    def update(self, trajectory: Trajectory) -> None:
        """Adapt to what a trajectory showed. Called by `AnnealedEstimator.adapt`, never by `forward`."""

    def shorten(self) -> None:
        """Halve those that adapt: for a training step that came to nothing, because chains diverged."""


class FixedStepSizes(StepSizes):
    """Step sizes that stay as they are.

    Args:
        num_steps: K.
        step_size: one number, a tensor `[K]`, `[K, D]` or `[K, B, D]`, or `[1, D]` for the same vector in every step.

    >>> FixedStepSizes(3, 0.1)()
    tensor([0.1000, 0.1000, 0.1000])
    """

    values: Tensor

    def __init__(self, num_steps: int, step_size: float | Tensor = 0.01):
        super().__init__()
        self.num_steps = num_steps
        self.register_buffer("values", _per_step(num_steps, step_size))

    def forward(self, initial: Distribution | None = None) -> Tensor:
        """See `StepSizes`."""
        return self.values


class LearnedStepSizes(StepSizes):
    """Step sizes learned with everything else, through the bound.

    The paper advises against it: a step size that maximises the bound need not keep the chain moving.

    Args:
        num_steps: K.
        step_size: where to start; as for `FixedStepSizes`.

    >>> LearnedStepSizes(2, 0.5)().detach()
    tensor([0.5000, 0.5000])
    """

    def __init__(self, num_steps: int, step_size: float | Tensor = 0.01):
        super().__init__()
        self.num_steps = num_steps
        self.log_values = nn.Parameter(_per_step(num_steps, step_size).log())

    def forward(self, initial: Distribution | None = None) -> Tensor:
        """See `StepSizes`."""
        return self.log_values.exp()


class RelativeStepSizes(StepSizes):
    """Step sizes in units of the initial distribution's scales, so that they fit every datum.

    Args:
        relative: other step sizes of shape `[K]`, or `[K, B]` for one per datum, which this multiplies; learned ones
            stay learned.
        unit: the step size that means one standard deviation, usually `kernel.step_unit`.

    >>> import mcvae
    >>> from torch.distributions import Independent, Normal
    >>> initial = Independent(Normal(torch.zeros(1, 1), 2 * torch.ones(1, 1)), 1)
    >>> RelativeStepSizes(FixedStepSizes(1, 0.5), mcvae.ula().step_unit)(initial)
    tensor([[[2.]]])
    """

    def __init__(self, relative: StepSizes, unit: Callable[[Tensor], Tensor]):
        super().__init__()
        self.num_steps, self.relative, self.unit = relative.num_steps, relative, unit

    def forward(self, initial: Distribution | None = None) -> Tensor:
        """See `StepSizes`; `[K, B, D]`, or the relative ones if there is no initial distribution to relate them to."""
        values: Tensor = self.relative()
        if initial is None:
            return values
        values = values.unsqueeze(-1) if values.dim() == 1 else values  # [K, 1] or [K, B]
        unit = self.unit(standard_deviation(initial))  # with its gradient: the bound depends on the scales in it
        return values.to(unit).unsqueeze(-1) * unit

    def update(self, trajectory: Trajectory) -> None:
        """Let the relative ones adapt."""
        self.relative.update(trajectory)

    def shorten(self) -> None:
        """See `StepSizes`."""
        self.relative.shorten()


class AcceptanceAdapted(StepSizes):
    """One step size per move, driven to an acceptance ρ: log η_k ← log η_k + gain (acceptance_k − ρ).

    Args:
        num_steps: K.
        step_size: where to start; as for `FixedStepSizes`.
        target: ρ.
        rate: the gain.
    """

    log_values: Tensor

    def __init__(self, num_steps: int, step_size: float | Tensor = 0.01, *, target: float = 0.8, rate: float = 0.3):
        super().__init__()
        self.num_steps = num_steps
        self.target, self.rate = _probability(target), rate
        self.register_buffer("log_values", _per_step(num_steps, step_size).log())

    def forward(self, initial: Distribution | None = None) -> Tensor:
        """See `StepSizes`."""
        return self.log_values.exp()

    @torch.no_grad()
    def update(self, trajectory: Trajectory) -> None:
        """Move every step size towards the target acceptance."""
        excess = trajectory.acceptance.mean(1).to(self.log_values) - self.target
        self.log_values = self.log_values + self.rate * excess.reshape(-1, *[1] * (self.log_values.dim() - 1))

    def shorten(self) -> None:
        """See `StepSizes`."""
        self.log_values = self.log_values - math.log(2)

    def extra_repr(self) -> str:
        """Show the settings in `repr`."""
        return f"target={self.target}"


class ScoreScaled(StepSizes):
    """The paper's rule, one vector per step: η_k ← 0.9 η_k + 0.1 η₀ / (ε + std ∂log p(x, z)) (Section 4.1).

    The scalar η₀ of each step is driven to the acceptance ρ as in `AcceptanceAdapted`.

    Args:
        num_steps: K.
        latent_dim: D; unless it is given, the first update, which sees chains, makes a vector of the one number η₀.
        step_size: where η and η₀ start.
        target: ρ; the paper takes 0.8 for A-MCVAE and 0.9 for L-MCVAE.
        rate: gain of η₀.
        memory: weight of the past, 0.9 in the paper.
        epsilon: ε, which the paper leaves open; it bounds the step in a dimension that the likelihood ignores.
    """

    values: Tensor
    log_base: Tensor

    def __init__(
        self,
        num_steps: int,
        latent_dim: int | None = None,
        step_size: float = 0.01,
        *,
        target: float = 0.9,
        rate: float = 0.3,
        memory: float = 0.9,
        epsilon: float = 0.01,
    ):
        super().__init__()
        self.num_steps = num_steps
        self.target, self.rate, self.memory, self.epsilon = _probability(target), rate, memory, epsilon
        width = 1 if latent_dim is None else latent_dim
        self.register_buffer("values", _per_step(num_steps, torch.full((1, width), float(step_size))))
        self.register_buffer("log_base", _per_step(num_steps, step_size).log())

    def forward(self, initial: Distribution | None = None) -> Tensor:
        """See `StepSizes`."""
        return self.values

    @torch.no_grad()
    def update(self, trajectory: Trajectory) -> None:
        """Apply the rule once."""
        std = trajectory.score_std
        if not len(self.values) or trajectory.log_weight.numel() < 2:  # one chain has no spread
            return
        if std is None:
            raise ValueError(
                "score-scaled step sizes need scores, and this kernel computes none. Use AcceptanceAdapted instead."
            )
        excess = trajectory.acceptance.mean(1).to(self.log_base) - self.target
        self.log_base = self.log_base + self.rate * excess
        scaled = self.log_base.exp().unsqueeze(-1) / (self.epsilon + std.to(self.values))
        self.values = self.memory * self.values + (1 - self.memory) * scaled

    def shorten(self) -> None:
        """See `StepSizes`."""
        self.values, self.log_base = self.values / 2, self.log_base - math.log(2)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Take the latent dimension of what is loaded, unless it is known."""
        loaded = state_dict.get(f"{prefix}values")
        if isinstance(loaded, Tensor) and self.values.shape[1] == 1 and loaded.shape[:1] == self.values.shape[:1]:
            self.values = self.values.expand(loaded.shape).clone()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """Show the settings in `repr`."""
        return f"target={self.target}"


def _per_step(num_steps: int, step_size: float | Tensor) -> Tensor:
    """Repeat to `[K]` or `[K, D]`, checked."""
    if index(num_steps) < 0:
        raise ValueError(f"the number of steps K must not be negative, got {num_steps}.")
    dtype = torch.get_default_dtype()
    values = step_size.to(dtype) if isinstance(step_size, Tensor) else torch.tensor(step_size, dtype=dtype)
    repeated = values.dim() == 2 and len(values) == 1
    if values.dim() > 3 or (values.dim() and len(values) != num_steps and not repeated):
        raise ValueError(
            f"step sizes must be one number, or of shape [K], [K, D], [K, B, D] or [1, D] with K = {num_steps}, got "
            f"{list(values.shape)}."
        )
    if not bool((values > 0).all()):
        raise ValueError(f"step sizes must be positive, got {values.tolist()}.")
    return values.expand(num_steps, *values.shape[1:]).clone()


def _probability(target: float) -> float:
    if not 0 < target < 1:
        raise ValueError(f"the target acceptance must lie strictly between 0 and 1, got {target}.")
    return target
