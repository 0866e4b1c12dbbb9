"""Refreshments: how a kept momentum forgets between leapfrog steps, as Gaussians N(mean, scale²) of the new one."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mcvae.core.bridge import Bridge, State, Step
from mcvae.core.drifts import Drift

__all__ = ["Friction", "PartialRefreshment", "Refreshment"]

Refreshment = Callable[[Bridge, State, Step], tuple[Tensor, Tensor]]
"""`(bridge, state, step) -> (mean, scale)` of the new momentum; the state holds the old one."""


class PartialRefreshment(nn.Module):
    """ρ' ~ N(h ρ, 1 − h²), which leaves N(0, I) invariant: the refreshment of UHA and differentiable AIS.

    Args:
        damping: h in (0, 1), the share of the momentum that survives.
        learned: whether h is a parameter.
    """

    def __init__(self, damping: float, *, learned: bool = False):
        super().__init__()
        if not 0 < damping < 1:
            raise ValueError(f"damping must lie strictly between 0 and 1, got {damping}.")
        logit = torch.tensor(math.log(damping / (1 - damping)), dtype=torch.get_default_dtype())
        self.logit = nn.Parameter(logit, requires_grad=learned)

    def forward(self, bridge: Bridge, state: State, step: Step) -> tuple[Tensor, Tensor]:
        """See `Refreshment`."""
        assert state.momentum is not None
        damping = self.logit.sigmoid()
        return damping * state.momentum, (1 - damping.square()).sqrt()

    def extra_repr(self) -> str:
        """Show the settings in `repr`."""
        return f"damping={self.logit.sigmoid().item():.3g}"


class Friction(nn.Module):
    """ρ' ~ N((1 − γε) ρ + 2γε c(z, ρ), 2γε): a step of size ε of Langevin dynamics with friction γ and a control c.

    With a control in the backward density alone it is LDVI; with one control and opposite signs it is CMCD-UD.

    Args:
        friction: γ, where it starts; it is a parameter. Give the same `Friction` both directions by `controlled`.
        control: c, a drift that may see the momentum; none by default.
        sign: of the control.
    """

    def __init__(self, friction: float | nn.Parameter, control: Drift | None = None, sign: float = 1.0):
        super().__init__()
        if isinstance(friction, nn.Parameter):
            self.log_friction = friction
        else:
            if not friction > 0:
                raise ValueError(f"friction must be positive, got {friction}.")
            self.log_friction = nn.Parameter(torch.tensor(friction, dtype=torch.get_default_dtype()).log())
        self.control, self.sign = control, sign

    def controlled(self, control: Drift, sign: float = 1.0) -> "Friction":
        """The same friction, the same parameter, with a control."""
        return Friction(self.log_friction, control, sign)

    def forward(self, bridge: Bridge, state: State, step: Step) -> tuple[Tensor, Tensor]:
        """See `Refreshment`."""
        assert state.momentum is not None
        lost = self.log_friction.exp() * step.step_size
        mean = (1 - lost) * state.momentum
        if self.control is not None:
            mean = mean + 2 * self.sign * lost * self.control(bridge, state, step)
        return mean, (2 * lost).sqrt()

    def extra_repr(self) -> str:
        """Show the settings in `repr`."""
        return f"friction={self.log_friction.exp().item():.3g}, sign={self.sign:+g}"
