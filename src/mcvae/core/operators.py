"""Operators whose second derivative torch computes wastefully, with one that costs what it should.

A chain that follows scores and is then differentiated needs the gradient of a gradient. torch has formulas for that,
but the one for a convolution's weight is a convolution with the image as its kernel, and the one for SiLU is a dozen
passes over memory. Inside `TwiceDifferentiable` they are replaced, in anyone's network, by operators whose backward
pass is made of ordinary, fast operators. Values and derivatives are the same.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (the field's name for it)
from torch.overrides import TorchFunctionMode

__all__ = ["TwiceDifferentiable"]


class _Phase:
    """Which backward pass is running: the one for a score, with respect to latents alone, or the last one."""

    score = False


class TwiceDifferentiable(TorchFunctionMode):
    """Run a model inside, then take its score inside `score_pass()`.

    >>> network = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3), torch.nn.SiLU())
    >>> z = torch.ones(1, 1, 4, requires_grad=True)
    >>> with TwiceDifferentiable() as mode:
    ...     value = network(z).sum()
    >>> with mode.score_pass():
    ...     (score,) = torch.autograd.grad(value, z, create_graph=True)
    >>> score.sum().backward()
    """

    def __init__(self) -> None:
        super().__init__()
        self._phase = _Phase()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace an operator where there is something better."""
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None and not torch._C._are_functorch_transforms_active():
            result = replacement(self._phase, *args, **kwargs or {})
            if result is not None:
                return result
        return func(*args, **kwargs or {})

    @contextmanager
    def score_pass(self) -> Iterator[None]:
        """Weights need no gradient in here."""
        self._phase.score = True
        try:
            yield
        finally:
            self._phase.score = False


class _Convolution(NamedTuple):
    """Settings of a convolution of any dimension, transposed or not."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, weight, bias, *self)

    def adjoint(self, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
        """The gradient with respect to `x`, as another convolution, which is differentiable at its usual cost."""
        left_over = [0] * len(self.stride)
        if not self.transposed:  # input that no window reached: its size is not seen in that of the gradient
            sizes = zip(x.shape[2:], gradient.shape[2:], weight.shape[2:], *self[:3], strict=True)
            left_over = [n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in sizes]
        reverse = self._replace(transposed=not self.transposed, output_padding=left_over)
        return reverse(gradient, weight, None)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: _Convolution, phase: _Phase
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings, ctx.phase = settings, phase
        ctx.bias_shape = None if bias is None else list(bias.shape)
        return settings(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        if ctx.phase.score:
            return ctx.settings.adjoint(x, gradient, weight), None, None, None, None
        needed = list(ctx.needs_input_grad[:3])
        computed = torch.ops.aten.convolution_backward(gradient, x, weight, ctx.bias_shape, *ctx.settings, needed)
        return *computed, None, None


def _convolution(phase: _Phase, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor | None:
    dimensions = weight.dim() - 2
    if x.dim() != weight.dim() or any(isinstance(setting, str) for setting in settings):
        return None  # a single image, or padding by name: rare enough for torch's own way
    stride, padding, dilation, transposed, output_padding, groups = settings

    def each(value: int | Sequence[int]) -> list[int]:
        values = [value] if isinstance(value, int) else list(value)
        return values * dimensions if len(values) == 1 else values

    described = _Convolution(each(stride), each(padding), each(dilation), transposed, each(output_padding), groups)
    result: Tensor = _Convolve.apply(x, weight, bias, described, phase)  # type: ignore[no-untyped-call]
    return result


def _convolve(
    phase: _Phase,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """Signature of `torch.conv2d` and its like."""
    return _convolution(phase, input, weight, bias, stride, padding, dilation, False, 0, groups)


def _convolve_transposed(
    phase: _Phase,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor | None:
    """Signature of `torch.conv_transpose2d` and its like."""
    return _convolution(phase, input, weight, bias, stride, padding, dilation, True, output_padding, groups)


class _Curve(Protocol):
    """An elementwise function f with two derivatives."""

    def value(self, x: Tensor) -> Tensor:
        """f(x)."""
        ...

    def slope(self, x: Tensor, gradient: Tensor) -> Tensor:
        """`gradient` f'(x)."""
        ...

    def bend(self, x: Tensor, gradient: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """`gradient` f''(x) `direction`, and `direction` f'(x)."""
        ...


class _Elementwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, curve: _Curve) -> Tensor:
        ctx.save_for_backward(x)
        ctx.curve = curve
        return curve.value(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return _Slope.apply(x, gradients[0], ctx.curve), None  # type: ignore[no-untyped-call]


class _Slope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor, curve: _Curve) -> Tensor:
        ctx.save_for_backward(x, gradient)
        ctx.curve = curve
        return curve.slope(x, gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, gradient = ctx.saved_tensors
        (direction,) = gradients
        return *ctx.curve.bend(x, gradient, direction), None


class _SiLU:
    """x σ(x)."""

    def value(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def slope(self, x: Tensor, gradient: Tensor) -> Tensor:
        slope: Tensor = torch.ops.aten.silu_backward(gradient, x)
        return slope

    def bend(self, x: Tensor, gradient: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """f'' = σ (1 − σ) (2 + x (1 − 2σ)) and f' = σ + x σ (1 − σ) from one exponential, in three buffers."""
        sigma = x.sigmoid()
        spread = torch.addcmul(sigma, sigma, sigma, value=-1)
        if torch.is_grad_enabled():  # to be differentiated, too
            return gradient * direction * spread * (2 + x * (1 - 2 * sigma)), direction * (sigma + x * spread)
        rest = torch.addcmul(x, x, sigma, value=-2).add_(2)
        slope = sigma.addcmul_(x, spread).mul_(direction)
        return rest.mul_(spread).mul_(gradient).mul_(direction), slope


class _CrossEntropy:
    """−log Bernoulli(target; logits): its slope is σ(logits) − target."""

    def __init__(self, target: Tensor):
        self.target = target

    def value(self, x: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(x, self.target, reduction="none")

    def slope(self, x: Tensor, gradient: Tensor) -> Tensor:
        return (x.sigmoid() - self.target) * gradient

    def bend(self, x: Tensor, gradient: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        sigma = x.sigmoid()
        return sigma * (1 - sigma) * gradient * direction, (sigma - self.target) * direction


def _elementwise(x: Tensor, curve: _Curve) -> Tensor:
    result: Tensor = _Elementwise.apply(x, curve)  # type: ignore[no-untyped-call]
    return result


def _silu(phase: _Phase, input: Tensor, inplace: bool = False) -> Tensor:
    return _elementwise(input, _SiLU())


def _cross_entropy(
    phase: _Phase, input: Tensor, target: Tensor, *weights: Any, reduction: str = "mean", **options: Any
) -> Tensor | None:
    special = weights or any(option is not None for option in options.values())
    if special or reduction != "none" or target.requires_grad or input.shape != target.shape:
        return None
    return _elementwise(input, _CrossEntropy(target))


_REPLACEMENTS: dict[Any, Callable[..., Tensor | None]] = {
    torch.conv1d: _convolve,
    torch.conv2d: _convolve,
    torch.conv3d: _convolve,
    torch.conv_transpose1d: _convolve_transposed,
    torch.conv_transpose2d: _convolve_transposed,
    torch.conv_transpose3d: _convolve_transposed,
    F.silu: _silu,
    F.binary_cross_entropy_with_logits: _cross_entropy,
}
