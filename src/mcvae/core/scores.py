"""A log density and its score from one evaluation, differentiable once more while gradients are enabled."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributions import Distribution, Independent, Normal

from mcvae.core.operators import TwiceDifferentiable

__all__ = ["LogDensity", "RoundedDensity", "ScoredDensity", "distribution_and_score", "recomputed", "value_and_score"]

LogDensity = Callable[[Tensor], Tensor]
"""An unnormalised log density of latents: `[S, B, D] -> [S, B]`, each row on its own."""


@runtime_checkable
class ScoredDensity(Protocol):
    """A log density that knows its score, so that autograd need not find it."""

    def __call__(self, z: Tensor) -> Tensor:
        """Log density, `[S, B, D] -> [S, B]`."""
        ...

    def value_and_score(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Log density `[S, B]` and its gradient `[S, B, D]`, both differentiable."""
        ...


@runtime_checkable
class RoundedDensity(Protocol):
    """A log density that knows how far rounding goes."""

    def rounding(self, z: Tensor) -> Tensor:
        """By how many nats the log density of latents `[S, B, D]` is off, `[S, B]`."""
        ...


def value_and_score(
    log_density: LogDensity, z: Tensor, with_score: bool = True, name: str = "log_density"
) -> tuple[Tensor, Tensor | None]:
    """Log density `[S, B]` and, if asked for, its gradient `[S, B, D]`; under `torch.no_grad()` without a graph."""
    if not with_score:
        return _checked(log_density(z), z, name), None
    if isinstance(log_density, ScoredDensity):
        value, score = log_density.value_and_score(z)
        if score.shape != z.shape:
            raise ValueError(
                f"{name}.value_and_score must return a score like z, {list(z.shape)}; got {list(score.shape)}."
            )
        return _checked(value, z, name), score
    if torch.compiler.is_compiling():  # which cannot trace autograd, but can this
        score, value = torch.func.grad(_total, has_aux=True)(z, log_density)
        return _checked(value, z, name), score
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "scores need autograd, which torch.inference_mode() switches off for good. Use torch.no_grad() instead."
        )
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        # Another tensor in either case: a transform that caches knows its own sample, and would not compute from it.
        z = z.view_as(z) if differentiable and z.requires_grad else z.detach().requires_grad_()
        with TwiceDifferentiable() if differentiable else nullcontext():
            value = _checked(log_density(z), z, name)
        if not value.requires_grad:
            raise ValueError(
                f"{name} must be differentiable in z by autograd, but its value has no graph. Did it call detach(), "
                "numpy() or item(), or run under torch.no_grad()?"
            )
        (score,) = torch.autograd.grad(value.sum(), z, create_graph=differentiable, materialize_grads=True)
    return value if differentiable else value.detach(), score


def distribution_and_score(
    distribution: Distribution, z: Tensor, with_score: bool = True
) -> tuple[Tensor, Tensor | None]:
    """log density and score of a distribution with batch `[B]`, event `[D]`; in closed form for Gaussians."""
    base: Any = getattr(distribution, "base_dist", None)
    if type(distribution) is not Independent or type(base) is not Normal:  # a subclass may mean something else
        return value_and_score(distribution.log_prob, z, with_score, "initial.log_prob")
    scale = base.scale.to(torch.promote_types(base.scale.dtype, z.dtype))  # in half precision a sum has no digits
    deviation = (z - base.loc) / scale
    constant = scale.log().sum(-1) + 0.5 * z.shape[-1] * math.log(2 * math.pi)
    return -0.5 * deviation.square().sum(-1) - constant, -deviation / scale if with_score else None


def _total(z: Tensor, log_density: LogDensity) -> tuple[Tensor, Tensor]:
    value = log_density(z)
    return value.sum(), value


def _checked(value: Any, z: Tensor, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must return a tensor, got {type(value).__name__}. Compute it with torch.")
    if value.shape != z.shape[:-1]:
        raise ValueError(
            f"{name} must map latents [S, B, D] = {list(z.shape)} to log densities [S, B] = {list(z.shape[:-1])}, "
            f"got {list(value.shape)}. Sum over the latent and data dimensions, and keep samples and batch apart."
        )
    return value


Result = TypeVar("Result")


def recomputed(function: Callable[[], Result], device: torch.device) -> Result:
    """Call `function` and keep nothing that its backward pass needs: it is called again then.

    Unlike `torch.utils.checkpoint`, it lets `function` take gradients itself without computing anything twice now.

    Args:
        function: its operators must be the same at every call. It may draw from the global streams of the processor
            and of `device`, as dropout does: they are taken back to where they were for the second call.
        device: where it computes.
    """
    region = _Region(function, device)
    with saved_tensors_hooks(region.keep, region.find):
        result = function()
    region.complete()
    return result


class _Region:
    """Tensors that a call saved for its backward pass, by the order in which it saved them."""

    def __init__(self, function: Callable[[], Any], device: torch.device):
        self.function, self.saved, self.versions = function, dict[int, Tensor](), list[int]()
        self.done, self.device = False, device
        self.streams = _read_streams(device)
        kind = device.type
        self.autocast = torch.autocast(
            kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)
        )

    def keep(self, tensor: Tensor) -> int:
        index = len(self.versions)
        self.saved[index] = tensor
        self.versions.append(tensor._version)
        return index

    def find(self, index: int) -> Tensor:
        if self.done and index not in self.saved:
            self._call_again()
        tensor = self.saved.pop(index) if self.done else self.saved[index]  # not done: the function takes a gradient
        if tensor._version != self.versions[index]:  # torch itself does not look, since it hands the tensor over
            raise RuntimeError(
                f"a tensor {list(tensor.shape)} that a gradient needs has been modified by an inplace operation: in "
                "the model, or a parameter between forward and backward. Write x = 2 * x instead of x *= 2, and take "
                "gradients before the step of an optimiser."
            )
        return tensor

    def complete(self) -> None:
        """Forget what was saved, and the random state unless something was drawn."""
        self.saved.clear()
        self.done = True
        if all(torch.equal(a, b) for a, b in zip(self.streams, _read_streams(self.device), strict=True)):
            self.streams = []

    def _call_again(self) -> None:
        again = list[Tensor]()

        def keep(tensor: Tensor) -> Tensor:
            again.append(tensor.detach())
            return again[-1]  # the tensor itself, where an operator saves its own output, would never be freed

        with torch.enable_grad(), self.autocast, saved_tensors_hooks(keep, lambda tensor: tensor):
            now = _read_streams(self.device)
            _write_streams(self.device, self.streams)
            try:
                self.function()
            finally:
                _write_streams(self.device, now)
        if (number := len(self.versions)) != len(again):
            raise RuntimeError(
                f"the model saved {len(again)} tensors when it was evaluated again, and {number} before: it is "
                'not deterministic, or it changed between forward and backward. Use memory="normal".'
            )
        self.saved = dict(enumerate(again))


def _read_streams(device: torch.device) -> list[Tensor]:
    """States of the global random streams of the processor and of `device`."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def _write_streams(device: torch.device, states: list[Tensor]) -> None:
    """Set them; without states leave them as they are."""
    if states:
        torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1], device)
