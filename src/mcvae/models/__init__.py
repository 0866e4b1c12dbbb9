"""Latent variable models: encoder and decoder composed, networks to compose, and models that are solved exactly."""

from mcvae.models.build import build_model
from mcvae.models.flows import FlowEncoder
from mcvae.models.latent_variable_model import LatentVariableModel
from mcvae.models.likelihoods import (
    BernoulliLikelihood,
    DiscretizedLogistic,
    GaussianLikelihood,
    Likelihood,
    LogisticLikelihood,
)
from mcvae.models.networks import Decoder, GaussianEncoder, UpsampledConv2d
from mcvae.models.optimized import optimized
from mcvae.models.ppca import PPCA
from mcvae.models.quadrature import OneDimensional, log_integral
from mcvae.models.ring import Ring

__all__ = [
    "PPCA",
    "BernoulliLikelihood",
    "Decoder",
    "DiscretizedLogistic",
    "FlowEncoder",
    "GaussianEncoder",
    "GaussianLikelihood",
    "LatentVariableModel",
    "Likelihood",
    "LogisticLikelihood",
    "OneDimensional",
    "Ring",
    "UpsampledConv2d",
    "build_model",
    "log_integral",
    "optimized",
]
