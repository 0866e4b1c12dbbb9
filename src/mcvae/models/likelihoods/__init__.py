"""Likelihoods p(x | z): what the output of a decoder network means. A file each; `mcvae.runs.likelihood` names them.

A new one is a file with a `Likelihood` and a function `(datum, sigma) -> Likelihood`, and a line in that registry.
"""

from mcvae.models.likelihoods.bernoulli import BernoulliLikelihood
from mcvae.models.likelihoods.categorical import CategoricalLikelihood
from mcvae.models.likelihoods.gaussian import GaussianLikelihood
from mcvae.models.likelihoods.interface import Datum, Likelihood
from mcvae.models.likelihoods.logistic import DiscretizedLogistic, LogisticLikelihood
from mcvae.models.likelihoods.negative_binomial import NegativeBinomialLikelihood
from mcvae.models.likelihoods.poisson import PoissonLikelihood
from mcvae.models.likelihoods.student_t import StudentTLikelihood

__all__ = [
    "BernoulliLikelihood",
    "CategoricalLikelihood",
    "Datum",
    "DiscretizedLogistic",
    "GaussianLikelihood",
    "Likelihood",
    "LogisticLikelihood",
    "NegativeBinomialLikelihood",
    "PoissonLikelihood",
    "StudentTLikelihood",
]
