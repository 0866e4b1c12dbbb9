"""Make any network faster: channels last in memory, and upsampling and convolution in one operator.

The module's own `forward` runs, whatever it does; the operators it calls are watched and a few of them exchanged. So
branches, attributes that change and functions instead of layers make no difference.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn import functional as F  # noqa: N812 (the field's name for it)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from mcvae.core.operators import narrow_convolution
from mcvae.models.networks import upsample_and_convolve

__all__ = ["Report", "optimized"]

Module = TypeVar("Module", bound=nn.Module)


def optimized(module: Module) -> Module:
    """The same network, faster: a shallow copy that shares the module's layers and parameters.

    It computes the same numbers up to rounding and derivatives of every order, and has the same `state_dict`, methods
    and type. What it changed and left alone is in its attribute `report`, once it has been called.

    Changed are two-dimensional convolutions: they get images with channels last in memory, on processors and in half
    precision; one that directly follows a nearest-neighbour upsampling by 2, 4, … becomes one operator with it, which
    needs half the products or less; and on processors one with at most four output channels computes blocks of pixels
    as channels. A `view` of an image that has become impossible is taken of a copy, and so is `flatten`: do not write
    into one and read the image afterwards. Dropout draws another mask from the same seed.

    Args:
        module: a network with its `forward` in Python. For a model, optimise encoder and decoder.

    >>> decoder = nn.Sequential(nn.Unflatten(1, (2, 3, 3)), nn.Upsample(scale_factor=2), nn.Conv2d(2, 1, 3, padding=1))
    >>> fast, z = optimized(decoder), torch.randn(4, 18)
    >>> torch.allclose(fast(z), decoder(z), atol=1e-6)
    True
    >>> fast[2].weight is decoder[2].weight
    True
    >>> print(fast.report)
    changed: upsampling by 2 × 2 and convolution 2 → 1, 3 × 3: one operator
    changed: upsampling by 2 × 2 and convolution 2 → 1, 3 × 3: channels last in memory
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError("optimized needs a module whose forward is Python, got a ScriptModule. Optimise the original.")
    if not isinstance(module, nn.Module):
        raise TypeError(f"optimized needs an nn.Module, got {type(module).__name__}. Wrap a function in a module.")
    if isinstance(module.__dict__.get("forward"), _Forward):
        return module
    if hasattr(module, "report"):
        raise ValueError(f"{type(module).__name__} has an attribute `report`, where optimized puts its own. Rename it.")
    fast = type(module).__new__(type(module))
    fast.__dict__ = copy.copy(module.__dict__)
    forward = module.__dict__.get("forward", partial(type(module).forward, fast))
    report = Report()
    fast.report = report  # type: ignore[assignment]
    fast.forward = _Forward(forward, report)
    return fast


class Report:
    """What has been changed in a network so far and what was left alone, a line for each kind of layer."""

    __slots__ = ("changed", "left_alone")  # no part of what a network computes: see `evaluation.resume.fingerprint`

    def __init__(self) -> None:
        self.changed = dict[str, None]()  # in the order of their first use
        self.left_alone = dict[str, None]()

    def __str__(self) -> str:
        lines = [f"changed: {line}" for line in self.changed] + [f"left alone: {line}" for line in self.left_alone]
        return "\n".join(lines or ["nothing to change has been called"])


class _Forward:
    """A module's forward, with some operators exchanged."""

    def __init__(self, forward: Callable[..., Any], report: Report):
        self.forward, self.report = forward, report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Exchange(self.report):
            output = self.forward(*args, **kwargs)
        return pytree.tree_map(_contiguous, output)


def _contiguous(output: Any) -> Any:
    """A tensor, or a distribution with its parameters, in the layout that others expect."""
    if isinstance(output, Tensor):
        return output.contiguous()
    if isinstance(output, Distribution):
        for name, value in vars(output).items():
            if isinstance(value, Tensor | Distribution):
                setattr(output, name, _contiguous(value))
    return output


class _Exchange(TorchFunctionMode):
    def __init__(self, report: Report):
        super().__init__()
        self.report = report

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = _REPLACEMENTS.get(func)
        if replacement is None or torch._C._are_functorch_transforms_active():  # their tensors have no layout
            return func(*args, **kwargs or {})
        return replacement(self.report, *args, **kwargs or {})


def _channels_last(report: Report, name: str, image: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both converted, because a gradient may take its layout from either. Accelerators gain only in half precision."""
    if image.dim() == 4 and (image.device.type == "cpu" or image.dtype in (torch.float16, torch.bfloat16)):
        report.changed[f"{name}: channels last in memory"] = None
        last = torch.channels_last
        return image.contiguous(memory_format=last), weight.contiguous(memory_format=last)
    report.left_alone[name] = None
    return image, weight


def _interpolate(report: Report, input: Tensor, *args: Any, **options: Any) -> Tensor:
    """Signature of `F.interpolate`; remember where the result came from."""
    result = F.interpolate(input, *args, **options)
    given = dict(zip(("size", "scale_factor", "mode"), args, strict=False)) | options
    mode, factor = given.get("mode", "nearest"), given.get("scale_factor")
    scale = [large // small for large, small in zip(result.shape[2:], input.shape[2:], strict=True)]
    exact = [n * s for n, s in zip(input.shape[2:], scale, strict=True)] == list(result.shape[2:])
    if factor is not None and not given.get("recompute_scale_factor"):  # by 4.4, 2 pixels become 8, but not by fours
        exact = exact and list(factor if isinstance(factor, list | tuple) else [factor] * len(scale)) == scale
    # Indices of nearest neighbours are rounded products, which are certain to be exact for powers of two only.
    simple = all(s in (1, 2, 4, 8) for s in scale) and max(scale) > 1
    nearest = input.dim() == 4 and mode in ("nearest", "nearest-exact")
    if nearest and exact and simple and not (input.is_inference() or result.is_inference()):
        result._upsampled = input, scale, input._version, result._version  # type: ignore[attr-defined]
    else:
        report.left_alone[f"upsampling, {mode}, from {list(input.shape[2:])} to {list(result.shape[2:])}"] = None
    return result


def _convolve(
    report: Report,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Signature of `torch.conv2d`."""
    name = f"convolution {weight.shape[1] * groups} → {weight.shape[0]}, {weight.shape[2]} × {weight.shape[3]}"
    upsampled = getattr(input, "_upsampled", None)
    if upsampled is not None:
        image, scale, *versions = upsampled
        pads = _symmetric(padding, weight) if (_pair(stride), _pair(dilation), groups) == ([1, 1], [1, 1], 1) else None
        watched = input.requires_grad != image.requires_grad or input._backward_hooks or input.retains_grad
        if pads is not None and not watched and versions == [image._version, input._version]:
            name = f"upsampling by {scale[0]} × {scale[1]} and {name}"
            report.changed[f"{name}: one operator"] = None
            image, weight = _channels_last(report, name, image, weight)
            return upsample_and_convolve(image, weight, bias, scale, pads)
        report.left_alone[f"upsampling before {name} with stride {stride}, padding {padding}, groups {groups}"] = None
    image, weight = _channels_last(report, name, input, weight)
    narrow = narrow_convolution(image, weight, bias, stride, padding, dilation, groups)
    if narrow is None:
        return torch.conv2d(image, weight, bias, stride, padding, dilation, groups)
    report.changed[f"{name}: outputs in blocks of pixels"] = None
    return narrow


def _symmetric(padding: Any, weight: Tensor) -> list[int] | None:
    """Padding of height and width that can become one operator with upsampling, or None."""
    sizes = weight.shape[2:]
    if isinstance(padding, str):
        padding = [(k - 1) // 2 if k % 2 else -1 for k in sizes] if padding == "same" else 0
    pads = _pair(padding)
    return pads if all(0 <= p < k for p, k in zip(pads, sizes, strict=True)) else None


def _pair(value: Any) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * 2 if len(values) == 1 else values


def _convolve_transposed(report: Report, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
    """Signature of `torch.conv_transpose2d`."""
    name = f"transposed convolution of {weight.shape[0]} channels, {weight.shape[2]} × {weight.shape[3]}"
    image, weight = _channels_last(report, name, input, weight)
    return torch.conv_transpose2d(image, weight, *args, **options)


def _viewed(report: Report, image: Tensor, *shape: Any, **options: Any) -> Tensor:
    """Signature of `Tensor.view`, which cannot join the dimensions of an image, or part of one, with channels last."""
    try:
        return image.view(*shape, **options)
    except RuntimeError:
        return image.contiguous().view(*shape, **options)


def _viewed_as(report: Report, image: Tensor, other: Tensor) -> Tensor:
    """Signature of `Tensor.view_as`."""
    return _viewed(report, image, other.shape)


def _viewed_as_complex(report: Report, image: Tensor) -> Tensor:
    """Signature of `torch.view_as_complex`."""
    return torch.view_as_complex(image if image.stride(-1) == 1 else image.contiguous())


def _strided(report: Report, image: Tensor, *args: Any, **options: Any) -> Tensor:
    """Signature of `torch.as_strided`, whose meaning depends on the layout."""
    if image.dim() == 4 and image.is_contiguous(memory_format=torch.channels_last):
        image = image.contiguous()
    return torch.as_strided(image, *args, **options)


_REPLACEMENTS: dict[Any, Callable[..., Tensor]] = {
    F.interpolate: _interpolate,
    torch.conv2d: _convolve,
    torch.conv_transpose2d: _convolve_transposed,
    Tensor.view: _viewed,
    Tensor.view_as: _viewed_as,
    torch.view_as_complex: _viewed_as_complex,
    torch.as_strided: _strided,
    Tensor.as_strided: _strided,
}
