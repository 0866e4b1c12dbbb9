"""p(x, z) = p(z) p(x | z) with an amortised q(z | x), from any encoder and decoder."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from mcvae.bridge import Bridge
from mcvae.paths import GeometricPath, Path
from mcvae.randomness import draw

__all__ = ["LatentVariableModel", "standard_normal_prior"]


class LatentVariableModel(nn.Module):
    """A latent variable model made of two ordinary networks that return distributions.

    Args:
        encoder: `x [B, ...] -> Distribution` over latents with batch `[B]` and event `[D]`.
        decoder: `z [N, D] -> Distribution` over data with batch `[N]` and the event shape of one datum. It sees plain
            rows: samples and batch are flattened for it.
        prior: a Distribution over one latent (batch `[]`, event `[D]`), or a module or function without arguments
            that returns one (a learned prior, a flow of zuko), which moves with the model to another device or type.
            Standard normal by default.

    >>> def encoder(x):
    ...     return Independent(Normal(x, torch.ones_like(x)), 1)
    >>> def decoder(z):
    ...     return Independent(Normal(z, torch.ones_like(z)), 1)
    >>> model = LatentVariableModel(encoder, decoder)
    >>> model.bridge(torch.zeros(5, 2)).sample(3).log_p.shape
    torch.Size([3, 5])
    """

    def __init__(
        self,
        encoder: Callable[[Tensor], Distribution],
        decoder: Callable[[Tensor], Distribution],
        prior: Distribution | Callable[[], Distribution] | None = None,
    ):
        super().__init__()
        self.encoder, self.decoder, self.prior = encoder, decoder, prior

    def bridge(self, x: Tensor, *, path: Path | None = None, memory: Literal["normal", "low"] = "normal") -> Bridge:
        """The bridge from q(z | x) to p(x, z) for a batch of data `[B, ...]`; x is the context."""
        path = path if path is not None else GeometricPath()
        bridge = Bridge(self.encoder(x), partial(self.log_joint, x), path, x.reshape(len(x), -1), memory)
        if bridge.initial.batch_shape != (len(x),):
            raise ValueError(
                f"the encoder must return one distribution per datum, batch shape [{len(x)}], got "
                f"{list(bridge.initial.batch_shape)}."
            )
        return bridge

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        """log p(x, z) for data `[B, ...]` and latents `[S, B, D]`, as `[S, B]`."""
        num_samples, batch, _ = z.shape
        likelihood = self.decoder(z.flatten(0, 1))
        if not isinstance(likelihood, Distribution):
            raise TypeError(
                "the decoder must return a torch.distributions.Distribution over data, got "
                f"{type(likelihood).__name__}. Wrap its output, for example Independent(Bernoulli(logits=output), 1)."
            )
        rows = x if num_samples == 1 else x.expand(num_samples, *x.shape).flatten(0, 1)
        log_likelihood: Tensor = likelihood.log_prob(rows)
        if log_likelihood.shape != (num_samples * batch,):
            raise ValueError(
                f"the decoder must return one distribution per latent row, so that log_prob(x) has shape "
                f"[{num_samples * batch}], got {list(log_likelihood.shape)}. Wrap it in "
                f"torch.distributions.Independent(distribution, {x.dim() - 1})."
            )
        log_prior: Tensor = self._prior(z).log_prob(z) if self.prior is not None else _log_standard_normal(z)
        if log_prior.shape != (num_samples, batch):
            raise ValueError(
                f"the prior must be over one latent, batch shape [] and event shape [{z.shape[-1]}], so that "
                f"log_prob(z) has shape {[num_samples, batch]}, got {list(log_prior.shape)}. Wrap it in "
                "torch.distributions.Independent(distribution, 1)."
            )
        return log_prior + log_likelihood.reshape(num_samples, batch)

    def simulate(
        self, num_data: int, latent_dim: int | None = None, *, generator: Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw `(x [N, ...], z [N, D])` from the model; z is an exact posterior sample given x.

        Args:
            num_data: N.
            latent_dim: D; needed only for the default prior, which does not know it.
            generator: source of all randomness.
        """
        if self.prior is None and latent_dim is None:
            raise ValueError("simulate needs latent_dim, because this model was built without a prior that knows it.")
        like = next(self.parameters(), torch.empty(0)).new_empty(latent_dim or 0)
        with torch.no_grad():
            z = draw(self._prior(like), (num_data,), generator)
            return draw(self.decoder(z), (), generator), z

    def _prior(self, like: Tensor) -> Distribution:
        if self.prior is None:
            return standard_normal_prior(like)
        return self.prior if isinstance(self.prior, Distribution) else self.prior()


def _log_standard_normal(z: Tensor) -> Tensor:
    """log N(z; 0, I_D) in three operators, where the distribution needs twelve."""
    return -0.5 * (z.square().sum(-1) + z.shape[-1] * math.log(2 * math.pi))


def standard_normal_prior(like: Tensor) -> Distribution:
    """p(z) = N(0, I_D) for latents like `[..., D]`."""
    zero = like.new_zeros(like.shape[-1])
    return Independent(Normal(zero, torch.ones_like(zero)), 1)
