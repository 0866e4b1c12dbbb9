"""The composition kernel × schedule × step sizes × bound × control variate, as one trainable module."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from mcvae.core.annealing import Trajectory, anneal, anneal_hopefully
from mcvae.core.bounds import Bound, ControlVariate, elbo, leave_one_out, surrogate
from mcvae.core.bridge import Bridge, State
from mcvae.core.kernels import Kernel, MetropolisHastings
from mcvae.core.schedules import Schedule
from mcvae.core.step_sizes import StepSizes

__all__ = ["AnnealedEstimator", "Estimate"]


class Estimate(NamedTuple):
    """A bound for every datum of a batch."""

    bound: Tensor
    """The bound on log p(x), `[B]`: an honest number, without gradient."""
    loss: Tensor
    """What to minimise, `[B]`: minus the bound, with an unbiased gradient."""
    trajectory: Trajectory
    """The chains behind it."""


class AnnealedEstimator(nn.Module):
    """A Monte Carlo bound on log p(x) with an unbiased gradient. `mcvae.recipes` has the paper's compositions.

    Args:
        kernel: one kernel for all steps, or a sequence of K (learned backward kernels need one each).
        schedule: K temperatures; K = 0 is VAE or IWAE.
        step_sizes: K step sizes.
        num_samples: chains per datum, S.
        bound: `elbo`, `iwae`, `renyi(alpha)`, or any function `[S, B] -> [B]`.
        control_variate: `leave_one_out` or `none`; matters only for kernels that accept and reject.

    >>> import mcvae, torch
    >>> schedule = mcvae.LinearSchedule(3, interior=True)
    >>> objective = AnnealedEstimator(mcvae.mala(), schedule, mcvae.Fixed(3, 0.1), num_samples=4)
    >>> initial = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(5, 2), torch.ones(5, 2)), 1)
    >>> estimate = objective(mcvae.Bridge(initial, lambda z: -z.square().sum(-1)))
    >>> estimate.bound.shape, estimate.loss.shape
    (torch.Size([5]), torch.Size([5]))
    """

    def __init__(
        self,
        kernel: Kernel | Sequence[Kernel],
        schedule: Schedule,
        step_sizes: StepSizes,
        *,
        num_samples: int = 1,
        bound: Bound = elbo,
        control_variate: ControlVariate = leave_one_out,
    ):
        super().__init__()
        kernels = [kernel] if isinstance(kernel, Kernel) else list(kernel)
        num_steps = schedule.num_steps
        if not isinstance(kernel, Kernel) and len(kernels) != num_steps:
            raise ValueError(f"expected one kernel, or one for each of the {num_steps} steps, got {len(kernels)}.")
        if len(step_sizes()) != num_steps:
            raise ValueError(f"the schedule has {num_steps} steps, but there are {len(step_sizes())} step sizes.")
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}.")
        if num_steps > 0 and any(isinstance(k, MetropolisHastings) for k in kernels):
            control_variate(bound, torch.zeros(num_samples, 1))  # complains now rather than in the first step
        self.kernels = nn.ModuleList(kernels)
        self.schedule, self.step_sizes = schedule, step_sizes
        self.num_samples, self.bound, self.control_variate = num_samples, bound, control_variate

    def forward(self, bridge: Bridge, *, generator: Generator | None = None) -> Estimate:
        """Run the chains and return bound, loss and trajectory. Changes no state; see `adapt`."""
        kernels: list[Any] = list(self.kernels)
        if len(kernels) == 1:
            kernels = kernels * self.schedule.num_steps
        with_score = any(kernel.uses_score for kernel in kernels)
        point = bridge.sample(self.num_samples, with_score=with_score, generator=generator)
        run = anneal if point.z.device.type == "cpu" else anneal_hopefully
        trajectory = run(bridge, State(point), kernels, self.schedule(), self.step_sizes(), generator=generator)
        return Estimate(
            bound=self.bound(trajectory.log_weight.detach()),
            loss=-surrogate(trajectory, self.bound, self.control_variate),
            trajectory=trajectory,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Estimate:
        """Call `forward`."""
        estimate: Estimate = super().__call__(*args, **kwargs)
        return estimate

    def adapt(self, estimate: Estimate) -> None:
        """Let the step sizes learn from an estimate: after an optimiser step, never in evaluation."""
        self.step_sizes.update(estimate.trajectory)

    def extra_repr(self) -> str:
        """Show the settings in `repr`."""
        names = {
            "num_samples": self.num_samples,
            "bound": getattr(self.bound, "__name__", self.bound),
            "control_variate": getattr(self.control_variate, "__name__", self.control_variate),
        }
        return ", ".join(f"{key}={value}" for key, value in names.items())
