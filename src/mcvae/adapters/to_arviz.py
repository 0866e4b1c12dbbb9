"""ArviZ: posterior samples and the estimate of the evidence as InferenceData."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from mcvae._extras import needs_extra
from mcvae.core.evidence import Evidence

__all__ = ["to_arviz"]


def to_arviz(
    evidence: Evidence,
    num_samples: int = 1000,
    *,
    named: Mapping[str, Tensor] | None = None,
    generator: Generator | None = None,
) -> Any:
    """An `arviz.InferenceData` of equally weighted posterior samples, with the evidence as attributes.

    Args:
        evidence: an estimate for one density, or for a batch of data, which becomes a dimension.
        num_samples: how many.
        named: samples of your own by name, `[N, ...]`, such as `PyroPosterior.constrained`, instead of latents z.
        generator: source of all randomness.
    """
    with needs_extra("mcvae.adapters.to_arviz"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it announces its next version at every import
        import arviz

    if named is None:
        named = {"z": evidence.posterior(num_samples, generator=generator)}
    log_weights = evidence.log_weights
    found = arviz.from_dict(
        posterior={name: values.detach().cpu().numpy()[None] for name, values in named.items()},
        sample_stats={"log_weight": log_weights.detach().cpu().numpy()[None]},
    )
    found.posterior.attrs |= {
        "log_evidence": evidence.log_evidence.tolist(),
        "log_evidence_standard_error": evidence.standard_error.tolist(),
        "effective_sample_size": evidence.ess.tolist(),
        "verdict": evidence.verdict(),
        "torch": torch.__version__,
    }
    return found
