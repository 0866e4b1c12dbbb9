"""The composition kernel × schedule × step sizes × bound × gradient, as one module: trainable, or frozen by a pilot."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from mcvae.core.annealing import StepRecord, Trajectory, anneal
from mcvae.core.bounds import Bound, elbo
from mcvae.core.bridge import Bridge, Point, State, check_start, looking_is_free
from mcvae.core.compiled import CompiledChain
from mcvae.core.gradients import ControlVariate, Gradient, check_gradient, reparameterised, stopped, surrogate
from mcvae.core.kernels import Kernel
from mcvae.core.randomness import rewinder
from mcvae.core.resampling import Resampling
from mcvae.core.schedules import Schedule
from mcvae.core.step_sizes import StepSizes

__all__ = ["AnnealedEstimator", "Estimate"]


class Estimate(NamedTuple):
    """A bound for every datum of a batch."""

    bound: Tensor
    """The bound on log p(x), `[B]`: an honest number, without gradient."""
    loss: Tensor
    """What to minimise, `[B]`: minus the bound, with an unbiased gradient. Moves that reject need a smooth density."""
    trajectory: Trajectory
    """The chains behind it."""


class AnnealedEstimator(nn.Module):
    """A Monte Carlo bound on log p(x) with an unbiased gradient. `mcvae.recipes` has the compositions of the field.

    Args:
        kernel: one kernel for all steps, or a sequence of K.
        schedule: K temperatures; K = 0 is VAE or IWAE.
        step_sizes: K step sizes.
        num_samples: chains per datum, S.
        bound: `elbo`, `iwae`, `renyi(alpha)`, or any function `[S, B] -> [B]`.
        control_variate: `stopped`, `predicted` (for a batch of different data), `leave_one_out` or
            `no_control_variate`; matters only for kernels that accept and reject.
        gradient: "pathwise", or, without steps, "sticking-the-landing" or "doubly-reparameterised".
        resample: makes the chains an SMC sampler; only without gradients.
        compile: compile one move and its gradient at the first call, which takes seconds, and use it for all steps: the
            same numbers up to rounding, several times as fast where the model is small. See `CompiledChain`.

    >>> import mcvae, torch
    >>> schedule = mcvae.LinearSchedule(3, interior=True)
    >>> objective = AnnealedEstimator(mcvae.mala(), schedule, mcvae.FixedStepSizes(3, 0.1), num_samples=4)
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
        control_variate: ControlVariate = stopped,
        gradient: Gradient = "pathwise",
        resample: Resampling | None = None,
        compile: bool = False,
    ):
        super().__init__()
        _check_parts(schedule, step_sizes, bound)
        kernels = [kernel] if isinstance(kernel, Kernel) else list(kernel)
        num_steps = schedule.num_steps
        if not isinstance(kernel, Kernel) and len(kernels) != num_steps:
            raise ValueError(f"expected one kernel, or one for each of the {num_steps} steps, got {len(kernels)}.")
        if step_sizes.num_steps != num_steps:
            raise ValueError(f"the schedule has {num_steps} steps, but there are {step_sizes.num_steps} step sizes.")
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}.")
        check_gradient(gradient, bound, num_steps)
        if resample is not None:
            resample.check(num_samples)
        self.kernels = nn.ModuleList(kernels)
        self.schedule, self.step_sizes = schedule, step_sizes
        self.num_samples, self.bound, self.control_variate = num_samples, bound, control_variate
        self.gradient, self.resample = gradient, resample
        self.compiled = CompiledChain() if compile else None
        if num_steps > 0 and any(kernel.accepts for kernel in kernels):
            _check_control_variate(control_variate, bound, num_samples)

    @property
    def num_steps(self) -> int:
        """K."""
        return self.schedule.num_steps

    @property
    def moves(self) -> list[Kernel]:
        """The kernel of every move, K of them."""
        kernels: list[Any] = list(self.kernels)
        return kernels * self.num_steps if len(kernels) == 1 else kernels

    @property
    def uses_score(self) -> bool:
        """Whether any kernel reads scores."""
        return any(kernel.uses_score for kernel in self.moves)

    @property
    def num_evaluations(self) -> int:
        """Latents at which one chain evaluates the model, its first one included."""
        return 1 + sum(kernel.num_evaluations for kernel in self.moves)

    @property
    def target_acceptance(self) -> float:
        """The lowest acceptance that any kernel aims at."""
        return min((kernel.target_acceptance for kernel in self.moves), default=0.0)

    def forward(self, bridge: Bridge, *, generator: Generator | None = None) -> Estimate:
        """Run the chains and return bound, loss and trajectory. Changes no state; see `adapt`."""
        trajectory = self.run(bridge, generator=generator)
        if self.gradient == "pathwise":
            value = surrogate(trajectory, self.bound, self.control_variate)
        else:
            value = reparameterised(bridge, trajectory.state.point, self.bound)
        return Estimate(self.bound(trajectory.log_weight.detach()), -value, trajectory)

    def run(self, bridge: Bridge, num_samples: int | None = None, *, generator: Generator | None = None) -> Trajectory:
        """Run S chains, or `num_samples`, from q to p(x, ·).

        On an accelerator a chain assumes that every proposal can be evaluated. If one could not, it is run again from
        the same noise with a guarded bridge, so that no NaN reaches a gradient.
        """
        number = self.num_samples if num_samples is None else num_samples
        z = bridge.draw(number, generator=generator)
        if self.compiled is not None:
            rewind = rewinder(generator, z.device)
            found = self.compiled(bridge, z, *self._steps(bridge), resample=self.resample, generator=generator)
            if found is not None:
                return found
            rewind()
        point = bridge.evaluate(z, with_score=self.uses_score)
        check_start(point)
        if looking_is_free(z.device) or not torch.is_grad_enabled() or bridge.guarded:
            return self._anneal(bridge, point, generator)
        rewind = rewinder(generator, z.device)
        trajectory = self._anneal(bridge, point, generator)
        if trajectory.sound is None or bool(trajectory.sound.all()):
            return trajectory
        rewind()
        return self._anneal(replace(bridge, guarded=True), point, generator)

    def _anneal(self, bridge: Bridge, point: Point, generator: Generator | None) -> Trajectory:
        return anneal(bridge, State(point), *self._steps(bridge), resample=self.resample, generator=generator)

    def _steps(self, bridge: Bridge) -> tuple[list[Kernel], Tensor, Tensor]:
        """Kernel, temperature and step size of every move."""
        return self.moves, self.schedule(), self.step_sizes(bridge.initial)

    def run_reverse(
        self, bridge: Bridge, posterior_sample: Tensor, *, generator: Generator | None = None
    ) -> Trajectory:
        """Run chains from exact posterior samples `[S, B, D]` back to q: weights of mean 1 / p(x)."""
        point = bridge.evaluate(posterior_sample, with_score=self.uses_score)
        if not bool(point.log_p.isfinite().all()):
            raise ValueError("log_joint is not finite at posterior_sample, so it cannot have come from the posterior.")
        moves, betas, step_sizes = self._steps(bridge)
        steps = moves[::-1], betas.flip(0), step_sizes.flip(0)
        return anneal(bridge, State(point), *steps, start=1.0, end=0.0, generator=generator)

    def __call__(self, *args: Any, **kwargs: Any) -> Estimate:
        """Call `forward`."""
        estimate: Estimate = super().__call__(*args, **kwargs)
        return estimate

    def adapt(self, estimate: Estimate) -> None:
        """Let the step sizes learn from an estimate: after an optimiser step, never in evaluation."""
        self.step_sizes.update(estimate.trajectory)

    def _apply(self, *args: Any, **kwargs: Any) -> "AnnealedEstimator":
        """Move to another device or type; in half precision the small changes of step sizes would round away."""
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if any(values.dtype in (torch.float16, torch.bfloat16) for values in (*self.parameters(), *self.buffers())):
            self.float()
        return self

    def extra_repr(self) -> str:
        """Show the settings in `repr`."""
        names = {
            "num_samples": self.num_samples,
            "bound": getattr(self.bound, "__name__", self.bound),
            "control_variate": getattr(self.control_variate, "__name__", self.control_variate),
            "gradient": self.gradient,
            "resample": self.resample,
            "compile": self.compiled is not None,
        }
        return ", ".join(f"{key}={value}" for key, value in names.items())


def _check_parts(schedule: Any, step_sizes: Any, bound: Any) -> None:
    """Refuse a word or a number where an object is meant, and say which."""
    if not isinstance(schedule, nn.Module):
        raise TypeError(f"schedule must be a Schedule such as mcvae.LinearSchedule(5), got {schedule!r}.")
    if not isinstance(step_sizes, nn.Module):
        raise TypeError(f"step_sizes must be StepSizes such as mcvae.FixedStepSizes(5, 0.1), got {step_sizes!r}.")
    if not callable(bound):
        raise TypeError(f"bound must be mcvae.elbo, mcvae.iwae, mcvae.renyi(alpha) or a function, got {bound!r}.")


def _check_control_variate(control_variate: ControlVariate, bound: Bound, num_samples: int) -> None:
    """Try it, so that it complains now rather than in the first step."""
    zero = torch.zeros(min(num_samples, 2), 1)
    steps = StepRecord(*[zero.unsqueeze(0)] * 3)
    control_variate(bound, Trajectory(zero, None, zero, zero.bool(), steps=steps))  # type: ignore[arg-type]
