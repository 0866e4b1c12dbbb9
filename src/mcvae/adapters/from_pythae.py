"""pythae: a trained auto-encoder as a latent variable model, to be evaluated."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution, Independent, Normal

from mcvae.models.latent_variable_model import LatentVariableModel

__all__ = ["from_pythae"]


def from_pythae(model: nn.Module) -> LatentVariableModel:
    """The model of a pythae VAE: its Gaussian encoder, its decoder with the likelihood of its loss, N(0, 1) as prior.

    Its loss decides the likelihood: "mse" is a Gaussian with σ² = 1 (½ of the squared error, as in pythae ≥ 0.1), "bce"
    a Bernoulli of grey levels, which is a density of binary data only.

    Args:
        model: a trained `pythae.models.VAE`, or another with `encoder(x).embedding`, `encoder(x).log_covariance`,
            `decoder(z)["reconstruction"]`, `model_config` and `latent_dim`.
    """
    for name in ("encoder", "decoder", "latent_dim", "model_config"):
        if not hasattr(model, name):
            raise TypeError(f"expected a model of pythae, which has {name}; got {type(model).__name__}.")
    loss = getattr(model.model_config, "reconstruction_loss", None)
    if loss not in ("mse", "bce"):
        raise ValueError(f"expected a pythae model with reconstruction_loss mse or bce, got {loss!r}.")
    parts: Any = model.eval()
    return LatentVariableModel(_Encoder(parts.encoder), _Decoder(parts.decoder, loss), latent_dim=int(parts.latent_dim))


class _Encoder(nn.Module):
    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Distribution:
        found = self.encoder(x)
        return Independent(Normal(found["embedding"], (0.5 * found["log_covariance"]).exp()), 1)


class _Decoder(nn.Module):
    def __init__(self, decoder: nn.Module, loss: str):
        super().__init__()
        self.decoder, self.loss = decoder, loss

    def forward(self, z: Tensor) -> Distribution:
        mean = self.decoder(z)["reconstruction"]
        dimensions = mean.dim() - 1
        if self.loss == "bce":
            probability = mean.clamp(1e-7, 1 - 1e-7)  # a sigmoid in single precision reaches 0 and 1
            return Independent(Bernoulli(probs=probability, validate_args=False), dimensions)
        return Independent(Normal(mean, torch.ones_like(mean), validate_args=False), dimensions)
