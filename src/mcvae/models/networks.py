"""Networks for images and vectors, sized by their shape. All activations are smooth: scores are differentiated."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from mcvae.models.likelihoods import Likelihood

__all__ = [
    "Decoder",
    "GaussianEncoder",
    "LogCounts",
    "Scaled",
    "UpsampledConv2d",
    "conv_decoder",
    "conv_encoder",
    "linear_encoder",
    "mlp",
    "mlp_decoder",
    "mlp_encoder",
]

Shape = tuple[int, ...]
"""(C, H, W) of an image, (P,) of a vector."""


class GaussianEncoder(nn.Module):
    """q(z | x) = N(μ(x), diag σ²(x)) from a network with 2D outputs.

    Args:
        network: `x [B, ...] -> [B, 2 D]`; one that returns a distribution is left alone.
    """

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Distribution:
        """Distribution of the latents, batch `[B]`, event `[D]`."""
        output = self.network(x)
        if isinstance(output, Distribution):
            return output
        location, raw_scale = single(output).chunk(2, -1)
        # unvalidated: a scale that underflows is recognised by Bridge.sample, which says so
        return Independent(Normal(location, nn.functional.softplus(raw_scale), validate_args=False), 1)


class Decoder(nn.Module):
    """p(x | z) from a network and a likelihood.

    Args:
        network: `z [N, D] -> [N, channels, H, W]`.
        likelihood: what its output means.
    """

    def __init__(self, network: nn.Module, likelihood: Likelihood):
        super().__init__()
        self.network, self.likelihood = network, likelihood

    def forward(self, z: Tensor) -> Distribution:
        """Distribution of the data, batch `[N]`, event `[C, H, W]`."""
        return self.likelihood(single(self.network(z)))


def single(output: Tensor) -> Tensor:
    """At least single precision: in half, a sum over pixels or a density of latents has two digits."""
    return output.to(torch.promote_types(output.dtype, torch.float32))


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers with SiLU between them.

    >>> mlp([4, 8, 2])(torch.zeros(3, 4)).shape
    torch.Size([3, 2])
    """
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.SiLU()]
    return _initialised(nn.Sequential(*layers[:-1]))


class LogCounts(nn.Module):
    """log(1 + x), which brings counts to a scale that suits a network."""

    def forward(self, x: Tensor) -> Tensor:
        """`[B, ...]` to the same shape."""
        return x.log1p()


class Scaled(nn.Module):
    """x times a factor, such as 1/255 for pixels that are kept as they are."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """`[B, ...]` to the same shape."""
        return x * self.factor


def mlp_encoder(shape: Shape, outputs: int, hidden: Sequence[int] = (512, 512)) -> nn.Module:
    """Fully connected: images `[B, C, H, W]` or vectors `[B, P]` to `[B, outputs]`."""
    return nn.Sequential(nn.Flatten(), mlp([math.prod(shape), *hidden, outputs]))


def linear_encoder(shape: Shape, latent_dim: int) -> nn.Module:
    """One linear layer to 2 D numbers: a weak encoder, whose q is far from most posteriors.

    >>> linear_encoder((1, 8, 8), 16)(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 32])
    """
    return mlp_encoder(shape, 2 * latent_dim, hidden=())


def mlp_decoder(shape: Shape, latent_dim: int, hidden: Sequence[int] = (512, 512)) -> nn.Module:
    """Fully connected: latents `[N, D]` to images or vectors."""
    return nn.Sequential(mlp([latent_dim, *hidden, math.prod(shape)]), nn.Unflatten(1, shape))


def conv_encoder(shape: Shape, outputs: int, widths: Sequence[int] = (16, 32, 64, 64)) -> nn.Module:
    """Two convolutions per resolution, each half the one before, and one linear layer: the paper's eight and one.

    >>> conv_encoder((1, 28, 28), 128)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 128])
    """
    layers: list[nn.Module] = []
    for fan_in, width in pairwise([shape[0], *widths]):
        layers += [nn.AvgPool2d(2, ceil_mode=True)] if layers else []
        layers += [*_convolution(fan_in, width), *_convolution(width, width)]
    height, breadth = _halvings(shape, len(widths) - 1)[-1]
    return _initialised(nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * height * breadth, outputs)))


def conv_decoder(shape: Shape, latent_dim: int, widths: Sequence[int] = (16, 32, 64, 64)) -> nn.Module:
    """One linear layer, then nearest-neighbour upsampling and two convolutions per resolution, and a last one.

    >>> conv_decoder((3, 32, 32), 128)(torch.zeros(2, 128)).shape
    torch.Size([2, 3, 32, 32])
    """
    sizes = _halvings(shape, len(widths) - 1)[::-1]
    height, breadth = sizes[0]
    layers: list[nn.Module] = [
        nn.Linear(latent_dim, widths[-1] * height * breadth),
        nn.SiLU(),
        nn.Unflatten(1, (height, breadth, widths[-1])),
        _Permuted(0, 3, 1, 2),  # channels last in memory: the layout that convolutions are fast on
    ]
    outputs = [max(width // 2, widths[0]) for width in widths[-2::-1]]
    for fan_in, fan_out, small, size in zip([widths[-1], *outputs], outputs, sizes, sizes[1:], strict=False):
        layers += [*_upsampled(small, size, fan_in, fan_in // 2), *_convolution(fan_in // 2, fan_out)]
    pixelwise = [_Permuted(0, 2, 3, 1), nn.Linear(widths[0], shape[0]), _Permuted(0, 3, 1, 2)]
    return _initialised(nn.Sequential(*layers, *pixelwise))


class UpsampledConv2d(nn.Conv2d):
    """Nearest-neighbour upsampling by two and a 3 × 3 convolution, with four products per weight and pixel, not nine.

    Args:
        in_channels: channels of the small image.
        out_channels: channels of the image twice as large.
        bias: whether to add one.

    >>> small, layer = torch.randn(1, 3, 5, 5), UpsampledConv2d(3, 2)
    >>> plain = nn.functional.conv2d(nn.Upsample(scale_factor=2)(small), layer.weight, layer.bias, padding=1)
    >>> torch.allclose(layer(small), plain, atol=1e-5)
    True
    """

    def __init__(self, in_channels: int, out_channels: int, bias: bool = True):
        super().__init__(in_channels, out_channels, 3, padding=1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, C, H, W]` to `[N, C', 2 H, 2 W]`."""
        return upsample_and_convolve(x, self.weight, self.bias, (2, 2), (1, 1))


def upsample_and_convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Nearest-neighbour upsampling of `[N, C, H, W]` by a scale, then a convolution with stride 1, in one operator.

    Neighbours in the large image are copies of few pixels. So the weights that meet the same pixel are summed first,
    which makes of both operators one transposed convolution with the scale as its stride. Tap t of its kernel sums the
    mirrored weights from t − scale + 1 to t.

    Args:
        x: the small image.
        weight: `[C', C, height, width]`, as in `torch.conv2d`.
        bias: `[C']`, or None.
        scale: by how much height and width are upsampled.
        padding: of height and width, less than the kernel.
    """
    height, width = weight.shape[2:]
    sums = torch.kron(_sums(weight, height, scale[0]), _sums(weight, width, scale[1]))
    taps = weight.transpose(0, 1).reshape(-1, height * width) @ sums
    taps = taps.view(weight.shape[1], weight.shape[0], height + scale[0] - 1, width + scale[1] - 1)
    rest = (height - 1 - padding[0], width - 1 - padding[1])
    return nn.functional.conv_transpose2d(x, taps, bias, stride=tuple(scale), padding=rest)


def _sums(like: Tensor, size: int, scale: int) -> Tensor:
    """`[size, size + scale - 1]`, along one dimension: 1 where a weight is in the sum of a tap."""
    taps = torch.arange(size + scale - 1, device=like.device)
    first = size - 1 - torch.arange(size, device=like.device).unsqueeze(1)
    return ((taps >= first) & (taps < first + scale)).to(like.dtype)


_SILU_POWER = 0.3557  # E[SiLU(u)²] for u ~ N(0, 1)


class _Permuted(nn.Module):
    """Images with their dimensions in another order; in memory nothing moves."""

    def __init__(self, *order: int):
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.order)


def _upsampled(small: tuple[int, int], size: tuple[int, int], fan_in: int, fan_out: int) -> list[nn.Module]:
    """Nearest-neighbour upsampling from one size to another, then a convolution."""
    if size == (2 * small[0], 2 * small[1]):
        return [UpsampledConv2d(fan_in, fan_out), nn.SiLU()]
    return [nn.Upsample(size=size, mode="nearest"), *_convolution(fan_in, fan_out)]


def _convolution(fan_in: int, fan_out: int) -> list[nn.Module]:
    return [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.SiLU()]


def _initialised(network: nn.Sequential) -> nn.Sequential:
    """Weights that keep the power of signals through SiLU, except the last layer's; channels last in memory.

    torch's default shrinks signals layer by layer. A deep decoder would then start, and stay, blind to its latents.
    """
    layers = [layer for layer in network if isinstance(layer, nn.Linear | nn.Conv2d)]
    for layer in layers[:-1]:
        nn.init.normal_(layer.weight, std=(_SILU_POWER * layer.weight[0].numel()) ** -0.5)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _halvings(shape: Shape, number: int) -> list[tuple[int, int]]:
    """Height and width after 0, 1, … halvings, rounded up."""
    _, height, breadth = shape
    sizes = [(height, breadth)]
    for _ in range(number):
        height, breadth = sizes[-1]
        sizes.append(((height + 1) // 2, (breadth + 1) // 2))
    return sizes
