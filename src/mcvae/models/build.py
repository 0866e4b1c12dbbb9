"""Build a model from names: of the kind of data, the network, the likelihood, q and the prior."""

import math
from collections.abc import Callable
from importlib import import_module

import torch
from torch import nn

from mcvae.models.conditioned import ConditionedFeatures, ConditionedLatents
from mcvae.models.flows import FlowEncoder
from mcvae.models.latent_variable_model import LatentVariableModel
from mcvae.models.likelihoods import Datum, Likelihood
from mcvae.models.networks import (
    Decoder,
    GaussianEncoder,
    LogCounts,
    Scaled,
    Shape,
    conv_decoder,
    conv_encoder,
    mlp_decoder,
    mlp_encoder,
)
from mcvae.models.priors import build_prior
from mcvae.runs.likelihood import LIKELIHOODS, transform_for
from mcvae.runs.naming import check_name

__all__ = ["build_likelihood", "build_model"]

_EXAMPLES = 256
"""Conditions of training data that a model keeps, to simulate from."""
_WIDTHS = {"conv": (16, 32, 64, 64), "small": (16, 32)}


def build_model(
    shape: Shape,
    latent_dim: int,
    *,
    kind: str = "pixels",
    levels: int = 256,
    network: str = "conv",
    likelihood: str = "bernoulli",
    sigma: float = 1.0,
    flow: str | None = None,
    prior: str = "standard-normal",
    prior_components: int = 10,
    conditions: int = 0,
    encoder: Callable[[Shape, int], nn.Module] | None = None,
    decoder: Callable[[Shape, int], nn.Module] | None = None,
) -> LatentVariableModel:
    """Build a variational auto-encoder for data of `shape`: (C, H, W) for images, (P,) for vectors.

    Args:
        shape: of one datum.
        latent_dim: D.
        kind: what the data are: "pixels", "counts" or "real".
        levels: one more than the largest whole number, for a categorical likelihood.
        network: "conv" (the paper's: eight convolutions and a linear layer; upsampling and convolutions back), "small"
            (the same with four convolutions, for 8 × 8 digits) or "mlp", also for vectors.
        likelihood: one of `mcvae.runs.likelihood.LIKELIHOODS`, for data of this kind.
        sigma: σ of the Gaussian likelihood, or where it starts.
        flow: for q, one of `FLOWS`; a mean-field Gaussian if None.
        prior: one of `PRIORS`. With conditions, p(z | y) is N(μ(y), σ²(y)): latents are standardised by it.
        prior_components: of the mixtures among them.
        conditions: numbers C that the model is conditioned on; see `LatentVariableModel` for what data then are.
        encoder: called as (shape, latent_dim) for a network of your own, instead of `network`: from data to 2 D numbers
            `[B, 2 D]`, location and raw scale, or to a distribution.
        decoder: called as (shape of its output, number of its inputs) for a network of your own.

    >>> model = build_model((1, 8, 8), 16, network="small")
    >>> x, z = model.simulate(3)
    >>> x.shape
    torch.Size([3, 1, 8, 8])
    """
    datum = Datum(tuple(shape), kind, levels)
    head = build_likelihood(likelihood, datum, sigma)
    if latent_dim < 1:
        raise ValueError(f"latent_dim must be at least 1, got {latent_dim}.")
    outputs = (shape[0] * head.channels_per_channel, *shape[1:])
    features: nn.Module
    inputs = latent_dim + conditions
    check_name("network", network, [*_WIDTHS, "mlp"])
    if network == "mlp":
        hidden = (256, 256) if max(shape[1:], default=1) <= 16 else (512, 512)
        features, generator = mlp_encoder(shape, 2 * latent_dim, hidden), mlp_decoder(outputs, inputs, hidden)
    else:
        if len(shape) != 3:
            raise ValueError(f"the network {network} is for images [C, H, W], got data {list(shape)}. Choose mlp.")
        features = conv_encoder(shape, 2 * latent_dim, _WIDTHS[network])
        generator = conv_decoder(outputs, inputs, _WIDTHS[network])
    features = features if encoder is None else encoder(datum.shape, latent_dim)
    generator = generator if decoder is None else decoder(outputs, inputs)
    if kind == "counts":
        features = nn.Sequential(LogCounts(), features)
    elif kind == "pixels" and transform_for(likelihood, kind) == "keep":
        features = nn.Sequential(Scaled(1 / 255), features)
    if conditions:
        features = ConditionedFeatures(features, datum.shape, 2 * latent_dim, conditions)
        generator = nn.Sequential(ConditionedLatents(latent_dim, conditions), generator)
    q = GaussianEncoder(features) if flow is None else FlowEncoder(features, latent_dim, flow)
    seen = (math.prod(shape) + conditions,) if conditions else datum.shape
    return LatentVariableModel(
        q,
        Decoder(generator, head),
        build_prior(prior, latent_dim, q, seen, prior_components),
        latent_dim=latent_dim,
        data_shape=datum.shape if conditions else None,
        examples=torch.zeros(_EXAMPLES, conditions) if conditions else None,
    )


def build_likelihood(name: str, datum: Datum, sigma: float = 1.0) -> Likelihood:
    """The likelihood of this name for such data.

    >>> build_likelihood("poisson", Datum((3,), "counts", 10))
    PoissonLikelihood()
    """
    transform_for(name, datum.kind)
    build = LIKELIHOODS[name].builder
    if isinstance(build, str):
        module, _, function = build.partition(".")
        build = getattr(import_module(f"mcvae.models.likelihoods.{module}"), function)
    likelihood: Likelihood = build(datum, sigma)
    return likelihood
