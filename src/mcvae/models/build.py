"""A model for images from a few words: which network, which likelihood, which q."""

from collections.abc import Callable

from torch import nn

from mcvae.models.flows import FlowEncoder
from mcvae.models.latent_variable_model import LatentVariableModel
from mcvae.models.likelihoods import BernoulliLikelihood, GaussianLikelihood, Likelihood, LogisticLikelihood
from mcvae.models.networks import (
    Decoder,
    GaussianEncoder,
    Shape,
    conv_decoder,
    conv_encoder,
    mlp_decoder,
    mlp_encoder,
)

__all__ = ["build_model"]

_WIDTHS = {"conv": (16, 32, 64, 64), "small": (16, 32)}


def build_model(
    shape: Shape,
    latent_dim: int,
    *,
    network: str = "conv",
    likelihood: str = "bernoulli",
    sigma: float = 1.0,
    flow: str | None = None,
) -> LatentVariableModel:
    """Build a variational auto-encoder for images of `shape` (C, H, W).

    Args:
        shape: of one image.
        latent_dim: D.
        network: "conv" (the paper's: eight convolutions and a linear layer; upsampling and convolutions back), "small"
            (the same with four convolutions, for 8 × 8 digits) or "mlp".
        likelihood: "bernoulli", "gaussian" (fixed σ), "gaussian-learned" or "logistic" (8-bit levels).
        sigma: σ of the Gaussian likelihood, or where it starts.
        flow: for q, one of `FLOWS`; a mean-field Gaussian if None.

    >>> model = build_model((1, 8, 8), 16, network="small")
    >>> x, z = model.simulate(3, latent_dim=16)
    >>> x.shape
    torch.Size([3, 1, 8, 8])
    """
    likelihoods: dict[str, Callable[[], Likelihood]] = {
        "bernoulli": BernoulliLikelihood,
        "gaussian": lambda: GaussianLikelihood(sigma),
        "gaussian-learned": lambda: GaussianLikelihood(sigma, learned=True),
        "logistic": LogisticLikelihood,
    }
    if likelihood not in likelihoods:
        raise ValueError(f"unknown likelihood {likelihood!r}; known are {', '.join(likelihoods)}.")
    if latent_dim < 1:
        raise ValueError(f"latent_dim must be at least 1, got {latent_dim}.")
    head = likelihoods[likelihood]()
    outputs = (shape[0] * head.channels_per_channel, *shape[1:])
    features: nn.Module
    if network == "mlp":
        hidden = (256, 256) if max(shape[1:]) <= 16 else (512, 512)
        features, generator = mlp_encoder(shape, 2 * latent_dim, hidden), mlp_decoder(outputs, latent_dim, hidden)
    elif network in _WIDTHS:
        features = conv_encoder(shape, 2 * latent_dim, _WIDTHS[network])
        generator = conv_decoder(outputs, latent_dim, _WIDTHS[network])
    else:
        raise ValueError(f"unknown network {network!r}; known are {', '.join([*_WIDTHS, 'mlp'])}.")
    encoder = GaussianEncoder(features) if flow is None else FlowEncoder(features, latent_dim, flow)
    return LatentVariableModel(encoder, Decoder(generator, head))
