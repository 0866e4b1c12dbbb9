"""Drifts: the vector fields that transitions follow, forward and backward, and networks to be learned in them.

A drift is a function `(bridge, state, step) -> [S, B, D]` of what a move knows. Scores, networks and their sums are all
drifts, so that every diffusion of `mcvae.recipes` is a pair of them.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mcvae.core.bridge import Bridge, State, Step

__all__ = ["AtNextStep", "Controlled", "Drift", "DriftNetwork", "StepEncoding", "amortised_over", "score"]

Drift = Callable[[Bridge, State, Step], Tensor]
"""`(bridge, state, step) -> [S, B, D]`: a function, or a module if it has parameters."""


def score(bridge: Bridge, state: State, step: Step) -> Tensor:
    """∇ log γ_β at the temperature of the move: the drift of Langevin dynamics."""
    return bridge.score(state.point, step.beta)


class Controlled(nn.Module):
    """The score plus a control: ∇ log γ_β(z) + sign · u(z).

    Args:
        control: u, a drift, usually a `DriftNetwork`.
        sign: +1 or −1; one control with both signs steers the two directions of one transition (CMCD).
    """

    def __init__(self, control: Drift, sign: float = 1.0):
        super().__init__()
        self.control, self.sign = control, sign

    def forward(self, bridge: Bridge, state: State, step: Step) -> Tensor:
        """See `Drift`."""
        return score(bridge, state, step) + self.sign * self.control(bridge, state, step)

    def extra_repr(self) -> str:
        """Show the settings in `repr`."""
        return f"sign={self.sign:+g}"


class AtNextStep(nn.Module):
    """A drift as the next step sees it: with its temperature and its index."""

    def __init__(self, drift: Drift):
        super().__init__()
        self.drift = drift

    def forward(self, bridge: Bridge, state: State, step: Step) -> Tensor:
        """See `Drift`."""
        return self.drift(bridge, state, step.next())


class StepEncoding(nn.Module):
    """Fourier features of k / (K + 1): one network can serve every step, and any number of them.

    Args:
        frequencies: number of them; the encoding has twice as many features.

    >>> from mcvae import Step
    >>> one, ten = torch.tensor(1.0), Step(3, 10, torch.tensor(0.3), torch.tensor(0.4), torch.tensor(0.1))
    >>> StepEncoding(4)(ten, like=one).shape
    torch.Size([8])
    """

    def __init__(self, frequencies: int = 8):
        super().__init__()
        self.num_features = 2 * frequencies

    def forward(self, step: Step, like: Tensor) -> Tensor:
        """Features `[2 F]` with the type and device of `like`."""
        frequency = torch.arange(1, self.num_features // 2 + 1, dtype=like.dtype, device=like.device)
        angle = (0.5 * math.pi * step.index / (step.num_steps + 1)) * frequency
        return torch.cat([angle.sin(), angle.cos()])


class DriftNetwork(nn.Module):
    """A learned control u_k(z, ρ; x): two residual layers that know the step, plus a learned multiple of the score.

    It works in the coordinates in which the initial distribution is standard, so that its output is of the size of a
    score, or, if it sees the momentum, of the size of a momentum. It starts at 0.

    Args:
        latent_dim: D.
        context_dim: C, the size of what it is amortised over (`Bridge.context`, usually the data); 0 for none.
        hidden: width of the layers.
        uses_momentum: whether it sees the momentum, too.

    >>> network = DriftNetwork(latent_dim=2)
    >>> sum(parameter.numel() for parameter in network.parameters())
    9700
    """

    def __init__(self, latent_dim: int, context_dim: int = 0, *, hidden: int = 64, uses_momentum: bool = False):
        super().__init__()
        self.latent_dim, self.context_dim, self.uses_momentum = latent_dim, context_dim, uses_momentum
        self.encoding = StepEncoding()
        self.step = nn.Linear(self.encoding.num_features, hidden)
        self.inputs = nn.Linear(latent_dim * (2 if uses_momentum else 1), hidden, bias=False)
        self.context = nn.Linear(context_dim, hidden, bias=False) if context_dim else None
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.outputs = nn.Linear(hidden, latent_dim)
        self.multiple = nn.Linear(self.encoding.num_features, latent_dim)
        for layer in (self.outputs, self.multiple):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, bridge: Bridge, state: State, step: Step) -> Tensor:
        """See `Drift`."""
        z = state.point.z
        mean, scale = _standardisation(bridge, z)
        inputs = (z - mean) / scale
        if self.uses_momentum:
            if state.momentum is None:
                raise ValueError("this drift sees the momentum, and the state has none. Use it in a Hamiltonian move.")
            inputs = torch.cat([inputs, state.momentum], -1)
        encoding = self.encoding(step, z)
        features = self.inputs(inputs) + self.step(encoding)
        if self.context is not None:
            features = features + self.context(amortised_over(bridge, self.context_dim).to(z))
        for layer in self.layers:
            features = features + layer(nn.functional.silu(features))
        outputs: Tensor = self.outputs(nn.functional.silu(features))
        multiple: Tensor = self.multiple(encoding)
        if self.uses_momentum:
            return outputs + multiple * scale * score(bridge, state, step)
        return outputs / scale + multiple * score(bridge, state, step)

    def extra_repr(self) -> str:
        """Show the settings in `repr`."""
        return f"latent_dim={self.latent_dim}, context_dim={self.context_dim}, uses_momentum={self.uses_momentum}"


def _standardisation(bridge: Bridge, z: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and scale of the initial distribution, `[B, D]` each; 0 and 1 for flows and heavy tails that have none."""
    zero, one = torch.zeros_like(z[0]), torch.ones_like(z[0])
    try:
        mean, scale = bridge.initial.mean.to(z), bridge.initial.stddev.to(z)
    except NotImplementedError:
        return zero, one
    return torch.where(mean.isfinite(), mean, zero), torch.where(scale.isfinite(), scale, one)


def amortised_over(bridge: Bridge, context_dim: int) -> Tensor:
    """The context of a bridge, `[B, C]`, checked."""
    context, batch = bridge.context, bridge.initial.batch_shape[0]
    if context is None or list(context.shape) != [batch, context_dim]:
        raise ValueError(
            f"this network is amortised over a context [B, C] = [{batch}, {context_dim}], got "
            f"{None if context is None else list(context.shape)}. Pass Bridge(..., context=x.flatten(1)), or build it "
            "with another context_dim (0 for none)."
        )
    return context
