"""Elementwise functions with a second derivative in few passes over memory, where torch's own needs a dozen.

Only functions that gain by it are here. Measured, torch's own way is as fast for ReLU, LeakyReLU, Hardtanh, Tanh,
Sigmoid and the binary cross-entropy. CELU is left out because torch rounds its `alpha` to
single precision, so that an exact one would differ.
"""

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (the field's name for it)

__all__ = ["ELU", "GELU", "Curve", "Mish", "SiLU", "Softplus", "TanhGELU", "evaluate"]


class Curve(Protocol):
    """An elementwise function f with two derivatives, multiplied by what the chain rule asks for.

    `first` and `second` are never recorded, so they may work in place on tensors of their own.
    """

    def value(self, x: Tensor) -> Tensor:
        """f(x), by torch's own operator."""
        ...

    def first(self, x: Tensor, gradient: Tensor) -> Tensor:
        """f'(x) `gradient`."""
        ...

    def second(self, x: Tensor, gradient: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """f''(x) `gradient` `direction`, and f'(x) `direction`."""
        ...


def evaluate(curve: Curve, x: Tensor) -> Tensor:
    """f(x), differentiable any number of times; twice at a low price.

    >>> x = torch.tensor([0.0, 1.0], requires_grad=True)
    >>> (first,) = torch.autograd.grad(evaluate(SiLU(), x).sum(), x, create_graph=True)
    >>> torch.autograd.grad(first.sum(), x)[0][0]
    tensor(0.5000)
    """
    result: Tensor = _Value.apply(x, curve)  # type: ignore[no-untyped-call]
    return result


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, curve: Curve) -> Tensor:
        ctx.save_for_backward(x)
        ctx.curve = curve
        return curve.value(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return ctx.curve.first(x, gradients[0]), None
        return _First.apply(x, gradients[0], ctx.curve), None  # type: ignore[no-untyped-call]


class _First(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor, curve: Curve) -> Tensor:
        ctx.save_for_backward(x, gradient)
        ctx.curve = curve
        return curve.first(x, gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, gradient = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return *ctx.curve.second(x, gradient, gradients[0]), None
        # To be differentiated a third time: torch's own way, through graphs that end at copies of both inputs.
        inputs = [x.view_as(x), gradient.view_as(gradient)]
        (first,) = torch.autograd.grad(ctx.curve.value(inputs[0]), inputs[0], inputs[1], create_graph=True)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        found = iter(torch.autograd.grad(first, wanted, gradients[0], create_graph=True, materialize_grads=True))
        return *(next(found) if tensor.requires_grad else None for tensor in inputs), None


class SiLU(NamedTuple):
    """x σ(x)."""

    def value(self, x: Tensor) -> Tensor:
        """See `Curve`."""
        return F.silu(x)

    def first(self, x: Tensor, gradient: Tensor) -> Tensor:
        """See `Curve`."""
        first: Tensor = torch.ops.aten.silu_backward(gradient, x)
        return first

    def second(self, x: Tensor, gradient: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """f' = σ + x σ (1 − σ) and f'' = σ (1 − σ) (2 + x (1 − 2σ)), from one exponential."""
        sigma = x.sigmoid()
        spread = torch.addcmul(sigma, sigma, sigma, value=-1)
        second = torch.addcmul(x, x, sigma, value=-2).add_(2).mul_(spread)
        first = sigma.addcmul_(x, spread)
        return second.mul_(gradient).mul_(direction), first.mul_(direction)


class GELU(NamedTuple):
    """x Φ(x), with Φ the distribution function of a standard normal."""

    def value(self, x: Tensor) -> Tensor:
        """See `Curve`."""
        return F.gelu(x)

    def first(self, x: Tensor, gradient: Tensor) -> Tensor:
        """See `Curve`."""
        first: Tensor = torch.ops.aten.gelu_backward(gradient, x)
        return first

    def second(self, x: Tensor, gradient: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """f'' = φ(x) (2 − x²), with φ the density of a standard normal."""
        square = x.square()
        density = square.mul(-0.5).exp_().mul_(gradient)
        second = square.sub_(2).mul_(density).mul_(direction).mul_(-1 / math.sqrt(2 * math.pi))
        return second, self.first(x, direction)


class TanhGELU(NamedTuple):
    """x (1 + tanh(u / 2)) / 2 = x σ(u) with u = k (x + 0.044715 x³), which approximates GELU."""

    def value(self, x: Tensor) -> Tensor:
        """See `Curve`."""
        return F.gelu(x, approximate="tanh")

    def first(self, x: Tensor, gradient: Tensor) -> Tensor:
        """See `Curve`."""
        first: Tensor = torch.ops.aten.gelu_backward(gradient, x, approximate="tanh")
        return first

    def second(self, x: Tensor, gradient: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """f'' = w (1 − w) (2u' + x u'' − |x| (1 − 2w) u'²) with w = σ(−|u|): a sigmoid, not a slow tanh.

        f'' is even, and where σ is small σ (1 − σ) keeps its digits.
        """
        k = 2 * math.sqrt(2 / math.pi)
        cubic = 0.044715 * k
        square, negative = x.square(), x.abs().neg_()
        small = square.mul(cubic).add_(k).mul_(negative).sigmoid_()  # w
        slope = square.mul(3 * cubic).add_(k)  # u'
        second = torch.addcmul(negative, negative, small, value=-2).mul_(slope).add_(2).mul_(slope)
        second = second.add_(square, alpha=6 * cubic).mul_(small.addcmul_(small, small, value=-1))
        return second.mul_(gradient).mul_(direction), self.first(x, direction)


class ELU(NamedTuple):
    """`scale` x above 0 and `scale` `alpha` (exp(x) − 1) below: ELU and SELU."""

    alpha: float = 1.0
    scale: float = 1.0

    def value(self, x: Tensor) -> Tensor:
        """See `Curve`."""
        value: Tensor = torch.ops.aten.elu(x, *self)
        return value

    def first(self, x: Tensor, gradient: Tensor) -> Tensor:
        """See `Curve`."""
        first: Tensor = torch.ops.aten.elu_backward(gradient, *self, 1.0, False, x)
        return first

    def second(self, x: Tensor, gradient: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """f'' = f' below 0, and 0 above."""
        first = self.first(x, direction)
        second: Tensor = torch.ops.aten.hardtanh_backward(first, x, -math.inf, 0.0)  # 0 where x is not below 0
        return second.mul_(gradient), first


class Softplus(NamedTuple):
    """log(1 + exp(`beta` x)) / `beta`, and x where `beta` x exceeds `threshold`."""

    beta: float = 1.0
    threshold: float = 20.0

    def value(self, x: Tensor) -> Tensor:
        """See `Curve`."""
        return F.softplus(x, *self)

    def first(self, x: Tensor, gradient: Tensor) -> Tensor:
        """See `Curve`."""
        first: Tensor = torch.ops.aten.softplus_backward(gradient, x, *self)
        return first

    def second(self, x: Tensor, gradient: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """f'' = β σ(β x) (1 − σ(β x)) below the threshold, and 0 above."""
        scaled = x * self.beta
        spread = torch.ops.aten.sigmoid_backward(gradient, scaled.sigmoid())
        second: Tensor = torch.ops.aten.hardtanh_backward(spread, scaled, -math.inf, self.threshold)
        return second.mul_(self.beta).mul_(direction), self.first(x, direction)


class Mish(NamedTuple):
    """x tanh(softplus(x))."""

    def value(self, x: Tensor) -> Tensor:
        """See `Curve`."""
        return F.mish(x)

    def first(self, x: Tensor, gradient: Tensor) -> Tensor:
        """f' = t + x t' with t = tanh(softplus(x)); torch's own has two slow functions."""
        tanh, _, slope = self._gate(x)
        return tanh.addcmul_(x, slope).mul_(gradient)

    def second(self, x: Tensor, gradient: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """f'' = t' (2 + x (1 − σ − 2 t σ))."""
        tanh, sigma, slope = self._gate(x)
        first = torch.addcmul(tanh, x, slope)
        second = tanh.mul_(sigma).mul_(-2).sub_(sigma).add_(1).mul_(x).add_(2).mul_(slope)
        return second.mul_(gradient).mul_(direction), first.mul_(direction)

    def _gate(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """t, σ and t' = (1 − t²) σ from one exponential e: t = n / (n + 2) with n = e² + 2e.

        Above 20, where e² would overflow in single precision, t is 1 even in double.
        """
        exponential = x.clamp(max=20).exp_()
        odds = (exponential + 2).mul_(exponential)
        tanh = odds.div_(odds + 2)
        sigma = exponential.div_(exponential + 1)
        return tanh, sigma, torch.ops.aten.tanh_backward(sigma, tanh)
