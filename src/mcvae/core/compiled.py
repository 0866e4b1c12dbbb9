"""Compiled chains: what `anneal` does, with one compiled move for all steps."""

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from mcvae.core.annealing import StepRecord, Trajectory, check_steps, mean_inside
from mcvae.core.bridge import Bridge, NonFiniteDensityError, Point, State, Step, refuse_start
from mcvae.core.kernels import Kernel, Transition
from mcvae.core.loops import CompiledLoop, Values
from mcvae.core.resampling import Resampling

__all__ = ["CompiledChain", "CompiledKernel"]

_log = logging.getLogger("mcvae")


class CompiledChain:
    """Runs chains from q to p(x, ·) whose moves, and their gradients, are compiled when they are first needed.

    Index, temperature, step size and noise of a move are its inputs, so that one compiled move serves any number of
    steps; other shapes are compiled anew. Noise is drawn as `anneal` draws it, so weights are the same up to rounding.
    Nothing is looked at on the way. If a row failed while gradients are wanted, or if the chain cannot be compiled, the
    answer is None, and the caller runs `anneal` from the same noise.

    >>> import mcvae
    >>> chain = CompiledChain()
    >>> chain.seconds, chain.failure  # nothing is compiled before the first call
    (0.0, None)
    """

    def __init__(self) -> None:
        self._loop = CompiledLoop(_move, _begin)
        self.failure: str | None = None
        """Why it gave up, if it did."""

    @property
    def seconds(self) -> float:
        """Time that compiling has taken so far."""
        return self._loop.seconds

    def __call__(
        self,
        bridge: Bridge,
        z: Tensor,
        kernels: Sequence[Kernel],
        betas: Tensor,
        step_sizes: Tensor,
        *,
        resample: Resampling | None = None,
        generator: Generator | None = None,
    ) -> Trajectory | None:
        """Run chains from samples `z [S, B, D]` of q; None if `anneal` must."""
        if self.failure is not None or not kernels:
            return None
        before = self.seconds
        try:
            _check_possible(kernels, resample, z)
            trajectory = self._run(bridge, z, kernels, betas, step_sizes, generator)
        except NonFiniteDensityError:
            raise
        except Exception as error:  # what torch cannot compile, `anneal` can run, or it says what is wrong
            self.failure = str(error).strip().split("\n")[0] or type(error).__name__
            warnings.warn(f"the chain is not compiled, and runs step by step: {self.failure}", stacklevel=4)
            return None
        if self.seconds > before:
            _log.info("compiled a chain in %.1f s", self.seconds - before)
        assert trajectory.sound is not None
        return None if torch.is_grad_enabled() and not bool(trajectory.sound.all()) else trajectory

    def _run(
        self,
        bridge: Bridge,
        z: Tensor,
        kernels: Sequence[Kernel],
        betas: Tensor,
        step_sizes: Tensor,
        generator: Generator | None,
    ) -> Trajectory:
        kernel, number = kernels[0], len(kernels)
        betas, step_sizes = betas.to(z.device, torch.float64), step_sizes.to(z)
        check_steps(z, kernels, betas, step_sizes, 0.0, 1.0)
        like = torch.empty(z.shape[:-1], dtype=torch.float64, device=z.device)
        state = kernel.start(State(Point(z.detach(), like, like, None, None)), generator)
        noise = zip(*(kernel.noise(state, generator) for _ in kernels), strict=True)
        index = torch.arange(1, number + 1, dtype=torch.float64, device=z.device)
        following = torch.cat([betas[1:], betas.new_ones(1)])
        places = torch.stack([index, torch.full_like(index, number), betas, following], 1)
        inputs = (places, step_sizes, *map(torch.stack, noise))
        found = self._loop((kernel, bridge), (z, state.momentum), inputs)
        refuse_start(int(found.begun[0]), like.numel())
        return _trajectory(found.carry, found.record)


class CompiledKernel(Kernel):
    """A kernel whose single moves are compiled when they are first needed: for pilots, which move one step at a time.

    Without gradients only; with them, and where compiling fails, it is the kernel itself.
    """

    def __init__(self, kernel: Kernel):
        super().__init__()
        self.kernel = kernel
        self.uses_score, self.accepts = kernel.uses_score, kernel.accepts
        self.target_acceptance, self.num_evaluations = kernel.target_acceptance, kernel.num_evaluations
        self._loop: CompiledLoop | None = CompiledLoop(_single)

    def step_unit(self, scale: Tensor) -> Tensor:
        """See `Kernel`."""
        return self.kernel.step_unit(scale)

    def forward(self, bridge: Bridge, state: State, step: Step, *, generator: Generator | None = None) -> Transition:
        """See `Kernel`."""
        if self._loop is None or torch.is_grad_enabled() or type(self.kernel).move is Kernel.move:
            return self.kernel(bridge, state, step, generator=generator)
        state = self.kernel.start(state, generator)
        noise = self.kernel.noise(state, generator)
        point, momentum = state
        sound = torch.ones_like(point.log_p, dtype=torch.bool) if point.sound is None else point.sound
        place = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=point.z.device) for v in step[:4]])
        inputs = tuple(value.unsqueeze(0).contiguous() for value in (place, step.step_size, *noise))
        try:
            done = self._loop((self.kernel, bridge), (*point[:5], sound, momentum), inputs).carry
        except Exception as error:  # as in CompiledChain
            self._loop = None
            warnings.warn(f"the pilot is not compiled: {str(error).strip().split(chr(10))[0]}", stacklevel=2)
            return self.kernel.move(bridge, state, step, *noise)
        new = State(Point(*done[:6]), done[6])
        return Transition(new, done[7], None, *done[8:])


def _single(fixed: Any, carry: Values, inputs: Values) -> tuple[Values, Values]:
    """One move, and what is told about it."""
    kernel, bridge = fixed
    state = State(Point(*carry[:6]), carry[6])
    moved = kernel.move(bridge, state, _step(inputs), *inputs[2:])
    told = (moved.log_ratio, moved.acceptance, moved.nonfinite, moved.sound)
    return (*_contiguous(moved.state.point), moved.state.momentum, *told), ()


def _step(inputs: Values) -> Step:
    """The place in the chain, from k, K, β and the next β in one tensor, and η; what follows in `inputs` is noise."""
    index, num_steps, beta, next_beta = inputs[0].unbind()
    return Step(index, num_steps, beta, next_beta, inputs[1])


def _check_possible(kernels: Sequence[Kernel], resample: Resampling | None, z: Tensor) -> None:
    if resample is not None:
        raise ValueError("resampling looks at the weights between moves.")
    if any(kernel is not kernels[0] for kernel in kernels):
        raise ValueError("only one kernel for all steps can be compiled.")
    if type(kernels[0]).move is Kernel.move:
        raise ValueError(f"{type(kernels[0]).__name__} has no `move`, a deterministic function of its noise.")
    if torch.is_autocast_enabled(z.device.type):
        raise ValueError("autocast is on.")


def _begin(fixed: Any, start: Values) -> tuple[Values, Values]:
    """The samples of q, evaluated, with the log-weight that a chain has so far, and that of one which stops here.

    Then the momentum, and whether anything was not finite, or failed. Reports how many samples cannot be evaluated.
    """
    (kernel, bridge), (z, momentum) = fixed, start
    point = bridge._evaluate(z, kernel.uses_score, None)
    log_weight = -bridge.log_density(point, 0.0)
    broken = point.log_p.isnan()
    clean = torch.zeros_like(broken)
    kept = None if momentum is None else momentum + 0.0  # what is carried must be computed
    carry = (*_contiguous(point), log_weight, log_weight + bridge.log_density(point, 1.0), kept, clean, clean)
    return carry, (broken.sum(),)


def _move(fixed: Any, carry: Values, inputs: Values) -> tuple[Values, Values]:
    """One move, with its bookkeeping as in `anneal`; what is carried is described by `_begin`."""
    kernel, bridge = fixed
    point = Point(*carry[:6])
    log_weight, stopped, momentum, nonfinite, failed = carry[6:]
    moved = kernel.move(bridge, State(point, momentum), _step(inputs), *inputs[2:])
    broken = moved.log_ratio.isnan()
    log_ratio = torch.where(broken, -torch.inf, moved.log_ratio)
    log_weight = log_weight + log_ratio
    lost = log_weight.isnan()
    log_weight = torch.where(lost, -torch.inf, log_weight)
    new = moved.state.point
    closed = log_weight + bridge.log_density(new, 1.0)
    failed = failed | ~new.sound | ~moved.sound
    spread: Values = (None, None)
    if point.score_p is not None:
        spread = torch.std_mean(point.score_p.detach(), (0, 1), correction=0)
    kept = None if moved.state.momentum is None else moved.state.momentum.contiguous()
    return (
        (*_contiguous(new), log_weight, closed, kept, nonfinite | broken | lost | moved.nonfinite, failed),
        (log_ratio, moved.log_accept, stopped.detach() + 0.0, mean_inside(moved.acceptance, point.log_p), *spread),
    )


def _contiguous(point: Point) -> Values:
    """A move is compiled for contiguous tensors, and hands them to the next."""
    return tuple(None if value is None else value.contiguous() for value in point)


def _trajectory(carry: Values, record: Values) -> Trajectory:
    log_weight, momentum, nonfinite, failed = carry[7:]
    log_ratio, log_accept, stopped, acceptance, score_std, score_mean = record
    steps = None
    if torch.is_grad_enabled():
        steps = StepRecord(log_ratio, torch.zeros_like(log_ratio) if log_accept is None else log_accept, stopped)
    return Trajectory(
        log_weight=log_weight,
        state=State(Point(*carry[:6]), momentum),
        acceptance=acceptance,
        nonfinite=nonfinite,
        sound=~failed,
        steps=steps,
        score_std=score_std,
        score_mean=score_mean,
    )
