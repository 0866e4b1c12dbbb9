"""Operators whose second derivative torch computes wastefully, with one that costs what it should.

A chain that follows scores and is then differentiated needs the gradient of a gradient. torch has formulas for that,
but the one for a convolution's weight is a convolution with the image as its kernel, the one for SiLU is a dozen
passes over memory, and the one for fused attention does not exist. Inside `TwiceDifferentiable` such operators are
replaced, in anyone's network, by operators whose backward pass is made of ordinary, fast ones. Values and derivatives
are the same; an operator that cannot be replaced exactly is left alone.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter, functional as F  # noqa: N812 (the field's name for it)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from mcvae.core.elementwise import ELU, GELU, Curve, Mish, SiLU, Softplus, TanhGELU, evaluate

__all__ = ["TwiceDifferentiable", "narrow_convolution"]


class TwiceDifferentiable(TorchFunctionMode):
    """Run a model inside if its gradient is to be differentiated.

    >>> network = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3), torch.nn.SiLU())
    >>> z = torch.ones(1, 1, 4, requires_grad=True)
    >>> with TwiceDifferentiable():
    ...     value = network(z).sum()
    >>> (score,) = torch.autograd.grad(value, z, create_graph=True)
    >>> score.sum().backward()
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace an operator where there is something better."""
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None:
            result = replacement(*args, **kwargs or {})
            if result is not None:
                return result
        return func(*args, **kwargs or {})


def _replaceable(*tensors: Any) -> bool:
    """Whether these are ordinary tensors of ordinary autograd, which needs a graph of them."""
    return (
        all(type(tensor) in (Tensor, Parameter) for tensor in tensors)
        and any(tensor.requires_grad for tensor in tensors)
        and not any(tensor.is_complex() for tensor in tensors)
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


class _Convolution(NamedTuple):
    """Settings of a convolution of any dimension, transposed or not."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        block = 1 if self.transposed or not self.is_narrow(x, weight) else 4 if len(weight) == 1 else 2
        if block == 1 or any((n + 2 * p - k + 1) % block for n, p, k in self._sizes(x, weight)):
            return torch.convolution(x, weight, bias, *self)
        # Each output of a block of pixels becomes a channel, whose kernel is the weight at the pixel's place in it.
        outputs, inputs, height, width = weight.shape
        large = weight.new_zeros(outputs, block, block, inputs, height + block - 1, width + block - 1)
        for i in range(block):
            for j in range(block):
                large[:, i, j, :, i : i + height, j : j + width] = weight
        kernels = large.flatten(0, 2).contiguous(memory_format=torch.channels_last)
        repeated = None if bias is None else bias.repeat_interleave(block * block)
        return torch.pixel_shuffle(torch.conv2d(x, kernels, repeated, block, self.padding), block)

    def is_narrow(self, x: Tensor, weight: Tensor) -> bool:
        """Whether it has many inputs and hardly any output channels, as the last layer of a decoder.

        Processors compute sixteen channels at once, so for one or three of them they work mostly in vain.
        """
        plain = self.groups == 1 and {*self.stride, *self.dilation} == {1} and not any(self.output_padding)
        few = x.device.type == "cpu" and weight.dim() == 4 and len(weight) <= 4 and weight.shape[1] >= 8
        return plain and few and all(p < k for _, p, k in self._sizes(x, weight))

    def weight_gradient(self, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
        """The gradient with respect to the weight of a narrow convolution: that of the mirrored one, which is wide."""
        image, output = (gradient, x) if self.transposed else (x, gradient)
        padding = [k - 1 - p for k, p in zip(weight.shape[2:], self.padding, strict=True)]
        mirrored = self._replace(padding=padding, transposed=False)
        like = weight.transpose(0, 1)
        found = torch.ops.aten.convolution_backward(image, output, like, None, *mirrored, (False, True, False))[1]
        of_weight: Tensor = found.flip(2, 3).transpose(0, 1)
        return of_weight

    def _sizes(self, x: Tensor, weight: Tensor) -> Iterable[tuple[int, int, int]]:
        return zip(x.shape[2:], self.padding, weight.shape[2:], strict=True)

    def adjoint(self, size: torch.Size, gradient: Tensor, weight: Tensor) -> Tensor:
        """The gradient with respect to an input of this size, as another convolution, which is cheap to differentiate.

        The size of the gradient does not tell that of the input: a stride may leave pixels at the end that no window
        reaches, and output padding adds windows at the end where there is no input.
        """
        left_over = [0] * len(self.stride)
        if not self.transposed:
            sizes = zip(size[2:], gradient.shape[2:], weight.shape[2:], *self[:3], strict=True)
            left_over = [n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in sizes]
        reverse = self._replace(transposed=not self.transposed, output_padding=left_over)
        result: Tensor = _Convolve.apply(gradient, weight, None, reverse)  # type: ignore[no-untyped-call]
        for dimension, length in enumerate(size[2:], 2):
            if result.shape[dimension] != length:
                result = result.narrow(dimension, 0, length)
        return result


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: _Convolution) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = settings
        ctx.bias_shape = None if bias is None else list(bias.shape)
        return settings(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        wanted, settings = [_wanted(ctx, index) for index in range(3)], ctx.settings
        narrow = not torch.is_grad_enabled() and settings.is_narrow(x, weight)
        if not narrow and (wanted[1] or not torch.is_grad_enabled()):
            computed = torch.ops.aten.convolution_backward(gradient, x, weight, ctx.bias_shape, *settings, wanted)
            return *computed, None
        of_x = settings.adjoint(x.shape, gradient, weight) if wanted[0] else None
        of_weight = settings.weight_gradient(x, gradient, weight) if wanted[1] else None
        of_bias = gradient.sum([0, *range(2, gradient.dim())]) if wanted[2] else None
        return of_x, of_weight, of_bias, None


def _wanted(ctx: Any, index: int) -> bool:
    """Whether the running pass uses the gradient of this input; in that for a score, weights need none.

    Unless they depend on the latents themselves. Autograd knows, and treats its own operators alike.
    """
    if not ctx.needs_input_grad[index]:
        return False
    node, _ = ctx.next_functions[index]
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # it does not answer for a leaf whose gradient was asked for
        return True


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any, narrow: bool = False) -> Tensor | None:
    """A convolution that is fast to differentiate twice; None if torch must do it. With `narrow`, also if it is not."""
    present = [x, weight] if bias is None else [x, weight, bias]
    if not _replaceable(*present) or x.dim() != weight.dim():  # a single image: rare enough for torch's own way
        return None
    described = _described(weight, *settings)
    if described is None or (narrow and not described.is_narrow(x, weight)):
        return None
    device = x.device.type
    if torch.is_autocast_enabled(device):
        half = torch.get_autocast_dtype(device)
        present = [tensor if tensor.dtype == torch.float64 else tensor.to(half) for tensor in present]
    operands = present if bias is not None else [*present, None]
    result: Tensor = _Convolve.apply(*operands, described)  # type: ignore[no-untyped-call]
    return result


def _described(
    weight: Tensor, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int
) -> _Convolution | None:
    """Settings with a number for every dimension; None for padding with more on one side than on the other."""

    def each(value: int | Sequence[int]) -> list[int]:
        values = [value] if isinstance(value, int) else list(value)
        return values * (weight.dim() - 2) if len(values) == 1 else values

    if isinstance(padding, str):
        total = [d * (k - 1) for d, k in zip(each(dilation), weight.shape[2:], strict=True)]
        if padding == "same" and any(number % 2 for number in total):
            return None
        padding = [number // 2 for number in total] if padding == "same" else 0
    return _Convolution(each(stride), each(padding), each(dilation), transposed, each(output_padding), groups)


def narrow_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor | None:
    """`torch.conv2d` with many input and at most four output channels, faster on a processor; None for any other.

    >>> x, weight = torch.randn(2, 16, 8, 8), torch.randn(1, 16, 3, 3, requires_grad=True)
    >>> found = narrow_convolution(x, weight, None, 1, 1, 1, 1)
    >>> torch.allclose(found, torch.conv2d(x, weight, padding=1), atol=1e-5)
    True
    """
    return _convolution(x, weight, bias, stride, padding, dilation, False, 0, groups, narrow=True)


def _convolve(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """Signature of `torch.conv2d` and its like."""
    return _convolution(input, weight, bias, stride, padding, dilation, False, 0, groups)


def _convolve_transposed(
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
    return _convolution(input, weight, bias, stride, padding, dilation, True, output_padding, groups)


def _elementwise(curve: Curve, input: Tensor, inplace: bool = False) -> Tensor | None:
    """Signature of `F.silu` and its like, after the curve."""
    return evaluate(curve, input) if _replaceable(input) and not inplace else None


def _gelu(input: Tensor, *, approximate: str = "none") -> Tensor | None:
    return _elementwise(TanhGELU() if approximate == "tanh" else GELU(), input)


def _elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor | None:
    return _elementwise(ELU(alpha), input, inplace)


def _softplus(input: Tensor, beta: float = 1, threshold: float = 20) -> Tensor | None:
    if torch.is_autocast_enabled(input.device.type):  # which may compute it in another type than its input's
        return None
    return _elementwise(Softplus(beta, threshold), input)


def _attention(
    operator: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> Any:
    """Fused kernels have no second derivative; products and a softmax do."""
    if not any(tensor.requires_grad for tensor in (query, key, value)):
        return None
    with sdpa_kernel(SDPBackend.MATH):
        return operator(query, key, value, *args, **options)


_SELU = ELU(1.6732632423543772, 1.0507009873554805)

_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    torch.conv1d: _convolve,
    torch.conv2d: _convolve,
    torch.conv3d: _convolve,
    torch.conv_transpose1d: _convolve_transposed,
    torch.conv_transpose2d: _convolve_transposed,
    torch.conv_transpose3d: _convolve_transposed,
    F.silu: partial(_elementwise, SiLU()),
    F.gelu: _gelu,
    F.mish: partial(_elementwise, Mish()),
    F.elu: _elu,
    F.selu: partial(_elementwise, _SELU),
    torch.selu: partial(_elementwise, _SELU),
    F.softplus: _softplus,
    F.scaled_dot_product_attention: partial(_attention, F.scaled_dot_product_attention),
    F.multi_head_attention_forward: partial(_attention, F.multi_head_attention_forward),
}
