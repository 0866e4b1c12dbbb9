"""Networks for images, sized by the data's shape. All activations are smooth: scores are differentiated, too."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from mcvae.models.likelihoods import Likelihood

__all__ = ["Decoder", "GaussianEncoder", "conv_decoder", "conv_encoder", "mlp", "mlp_decoder", "mlp_encoder"]

Shape = tuple[int, int, int]
"""(C, H, W)."""


class GaussianEncoder(nn.Module):
    """q(z | x) = N(μ(x), diag σ²(x)) from a network with 2D outputs.

    Args:
        network: `x [B, ...] -> [B, 2 D]`.
    """

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Distribution:
        """Distribution of the latents, batch `[B]`, event `[D]`."""
        location, raw_scale = self.network(x).chunk(2, -1)
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
        return self.likelihood(self.network(z))


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers with SiLU between them.

    >>> mlp([4, 8, 2])(torch.zeros(3, 4)).shape
    torch.Size([3, 2])
    """
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.SiLU()]
    return _initialised(nn.Sequential(*layers[:-1]))


def mlp_encoder(shape: Shape, outputs: int, hidden: Sequence[int] = (512, 512)) -> nn.Module:
    """Fully connected: image `[B, C, H, W]` to `[B, outputs]`."""
    return nn.Sequential(nn.Flatten(), mlp([_size(shape), *hidden, outputs]))


def mlp_decoder(shape: Shape, latent_dim: int, hidden: Sequence[int] = (512, 512)) -> nn.Module:
    """Fully connected: latents `[N, D]` to an image."""
    return nn.Sequential(mlp([latent_dim, *hidden, _size(shape)]), nn.Unflatten(1, shape))


def conv_encoder(shape: Shape, outputs: int, widths: Sequence[int] = (16, 32, 64, 128)) -> nn.Module:
    """Two convolutions per halving of the image, and one linear layer: with four widths, the paper's eight.

    >>> conv_encoder((1, 28, 28), 128)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 128])
    """
    layers: list[nn.Module] = []
    for fan_in, width in pairwise([shape[0], *widths]):
        layers += [nn.Conv2d(fan_in, width, 3, stride=2, padding=1), nn.SiLU()]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.SiLU()]
    height, breadth = _halvings(shape, len(widths))[-1]
    return _initialised(nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * height * breadth, outputs)))


def conv_decoder(shape: Shape, latent_dim: int, widths: Sequence[int] = (16, 32, 64, 128)) -> nn.Module:
    """One linear layer, then nearest-neighbour upsampling and a convolution per doubling, and a last convolution.

    >>> conv_decoder((3, 32, 32), 128)(torch.zeros(2, 128)).shape
    torch.Size([2, 3, 32, 32])
    """
    sizes = _halvings(shape, len(widths))[::-1]
    height, breadth = sizes[0]
    layers: list[nn.Module] = [
        nn.Linear(latent_dim, widths[-1] * height * breadth),
        nn.SiLU(),
        nn.Unflatten(1, (widths[-1], height, breadth)),
    ]
    reversed_widths = [*widths[::-1], widths[0]]
    for (fan_in, width), size in zip(pairwise(reversed_widths), sizes[1:], strict=True):
        layers += [nn.Upsample(size=size, mode="nearest"), nn.Conv2d(fan_in, width, 3, padding=1), nn.SiLU()]
    return _initialised(nn.Sequential(*layers, nn.Conv2d(widths[0], shape[0], 3, padding=1)))


def _initialised(network: nn.Sequential) -> nn.Sequential:
    """Weights that keep the variance of activations (He et al.), except the last layer's.

    torch's default shrinks signals layer by layer; a deep decoder then starts deaf to its latents, and stays so.
    """
    layers = [layer for layer in network if isinstance(layer, nn.Linear | nn.Conv2d)]
    for layer in layers[:-1]:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return network


def _size(shape: Shape) -> int:
    return torch.Size(shape).numel()


def _halvings(shape: Shape, number: int) -> list[tuple[int, int]]:
    """Height and width after 0, 1, … strided convolutions: halves, rounded up."""
    sizes = [shape[1:]]
    for _ in range(number):
        height, breadth = sizes[-1]
        sizes.append(((height + 1) // 2, (breadth + 1) // 2))
    return sizes
