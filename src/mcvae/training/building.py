"""From a configuration to a model and its estimator, whose networks may be the user's own."""

import math
import os
import sys
from importlib import import_module
from typing import Any

from mcvae.core.estimator import AnnealedEstimator
from mcvae.models import Datum, LatentVariableModel, build_model
from mcvae.models.networks import linear_encoder
from mcvae.runs.config import ModelConfig, trusted_networks
from mcvae.runs.method import MethodConfig, method_named
from mcvae.runs.plain import RunError

__all__ = ["UntrustedError", "build"]


def build(
    model: ModelConfig, method: MethodConfig, datum: Datum, *, trusted: bool = False
) -> tuple[LatentVariableModel, AnnealedEstimator]:
    """Untrained model and estimator of a resolved configuration.

    Args:
        model, method: the configuration.
        datum: what one datum is.
        trusted: whether the person at the computer has named the networks, and not a file in a run folder. Those of a
            folder are imported only if the environment variable MCVAE_NETWORKS lists them, separated by commas.
    """
    latent_dim = model.latent_dim or 0
    encoder, decoder = _own_networks(model, trusted)
    network = build_model(
        datum.shape,
        latent_dim,
        kind=datum.kind,
        levels=datum.levels,
        network=model.network,
        likelihood=model.likelihood,
        sigma=model.sigma,
        flow=None if model.flow == "none" else model.flow,
        prior=model.prior,
        prior_components=model.prior_components,
        conditions=datum.conditions,
        encoder=encoder,
        decoder=decoder,
    )
    return network, method_named(method.name).build(method, latent_dim, math.prod(datum.shape) + datum.conditions)


class UntrustedError(RunError):
    """A run folder names code that the user has not trusted."""


def _own_networks(model: ModelConfig, trusted: bool) -> tuple[Any, Any]:
    """Import the encoder and the decoder that the user named as `module:name`; None for those not named."""
    named = [path for path in (model.encoder, model.decoder) if path is not None]
    if not trusted and not trusted_networks().issuperset(named):
        raise UntrustedError(
            f"the run uses networks of your own, {' and '.join(named)}, and nothing that a folder names is imported. "
            f"If you trust them, set the environment variable MCVAE_NETWORKS={','.join(named)}; or build the model in "
            "Python and use mcvae.load(folder, into=model)."
        )
    return _imported(model.encoder), _imported(model.decoder)


_OURS = {"linear": linear_encoder}


def _imported(path: str | None) -> Any:
    if path is None or path in _OURS:
        return _OURS.get(path or "")
    module, _, name = path.partition(":")
    here = os.getcwd()
    hidden = here not in sys.path  # python -m looks there, an installed command does not
    if hidden:
        sys.path.append(here)
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"the network {path!r} cannot be imported: {error}. Write it as module:Class.") from error
    finally:
        if hidden:
            sys.path.remove(here)
