"""Latent variable models: the composition of an encoder and a decoder, and models that can be solved exactly."""

from mcvae.models.latent_variable_model import LatentVariableModel
from mcvae.models.ppca import PPCA
from mcvae.models.quadrature import OneDimensional, log_integral
from mcvae.models.ring import Ring

__all__ = ["PPCA", "LatentVariableModel", "OneDimensional", "Ring", "log_integral"]
