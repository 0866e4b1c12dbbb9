"""Step sizes for AIS-HMC that a whole data set can share."""

import torch
from torch import Tensor

from mcvae.kernels import hmc
from mcvae.models import LatentVariableModel
from mcvae.randomness import seeded_generator
from mcvae.schedules import Schedule
from mcvae.tuning import pilot_step_sizes

__all__ = ["shared_step_sizes"]

_PILOT_IMAGES, _PILOT_CHAINS = 10, 4


def shared_step_sizes(model: LatentVariableModel, x: Tensor, schedule: Schedule, seed: int) -> Tensor:
    """A step size per temperature, `[K]`, from pilot chains on a few images: frozen for all of them."""
    with torch.no_grad():
        bridge = model.bridge(x[:_PILOT_IMAGES])
        generator = seeded_generator("pilot", seed, device=x.device)
        steps = pilot_step_sizes(bridge, hmc(3), schedule().detach(), num_chains=_PILOT_CHAINS, generator=generator)
    return steps.median(1).values.squeeze(-1)
