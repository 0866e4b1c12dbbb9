"""Latent variable models: encoder and decoder composed, networks to compose, and models that are solved exactly."""

from mcvae.models.build import build_model
from mcvae.models.flows import FlowEncoder
from mcvae.models.latent_variable_model import LatentVariableModel
from mcvae.models.likelihoods import (
    BernoulliLikelihood,
    CategoricalLikelihood,
    Datum,
    DiscretizedLogistic,
    GaussianLikelihood,
    Likelihood,
    LogisticLikelihood,
    NegativeBinomialLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from mcvae.models.networks import Decoder, GaussianEncoder, UpsampledConv2d
from mcvae.models.optimized import optimized
from mcvae.models.ppca import PPCA
from mcvae.models.priors import FlowPrior, MixturePrior, VampPrior
from mcvae.models.quadrature import OneDimensional, log_integral
from mcvae.models.ring import Ring

__all__ = [
    "PPCA",
    "BernoulliLikelihood",
    "CategoricalLikelihood",
    "Datum",
    "Decoder",
    "DiscretizedLogistic",
    "FlowEncoder",
    "FlowPrior",
    "GaussianEncoder",
    "GaussianLikelihood",
    "LatentVariableModel",
    "Likelihood",
    "LogisticLikelihood",
    "MixturePrior",
    "NegativeBinomialLikelihood",
    "OneDimensional",
    "PoissonLikelihood",
    "Ring",
    "StudentTLikelihood",
    "UpsampledConv2d",
    "VampPrior",
    "build_model",
    "log_integral",
    "optimized",
]
