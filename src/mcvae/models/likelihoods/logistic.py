"""8-bit pixels as levels of a discretised logistic distribution."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, constraints

from mcvae.models.likelihoods.interface import Datum, Likelihood

__all__ = ["DiscretizedLogistic", "LogisticLikelihood", "logistic"]


class LogisticLikelihood(Likelihood):
    """8-bit pixels, scaled to [0, 1]: a logistic distribution integrated over each level (Salimans et al., 2017)."""

    channels_per_channel = 2

    def forward(self, output: Tensor) -> Distribution:
        """See `Likelihood`."""
        location, log_scale = output.chunk(2, 1)
        levels = DiscretizedLogistic(location.sigmoid(), (log_scale - 3).clamp(min=-7))
        return Independent(levels, output.dim() - 1)


class DiscretizedLogistic(Distribution):
    """A distribution over the levels 0, 1/255, …, 1, whose end bins take the tails.

    >>> levels = torch.arange(256) / 255
    >>> total = DiscretizedLogistic(torch.tensor(0.3), torch.tensor(-2.0)).log_prob(levels).exp().sum()
    >>> round(total.item(), 4)
    1.0
    """

    arg_constraints = {"location": constraints.real, "log_scale": constraints.real}  # noqa: RUF012 (torch's protocol)

    def __init__(self, location: Tensor, log_scale: Tensor):
        self.location, self.log_scale = location, log_scale.expand_as(location)
        super().__init__(location.shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        """The location, inside [0, 1]."""
        return self.location.clamp(0, 1)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "DiscretizedLogistic":
        """See `Distribution.expand`."""
        return DiscretizedLogistic(self.location.expand(batch_shape), self.log_scale.expand(batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log probability of levels in [0, 1]."""
        half_bin, inverse_scale = 0.5 / 255, (-self.log_scale).exp()
        upper = inverse_scale * (value + half_bin - self.location)
        lower = inverse_scale * (value - half_bin - self.location)
        # log(sigma(upper) - sigma(lower)) = log sigma(upper) + log sigma(-lower) + log(1 - exp(lower - upper))
        log_width = torch.log(-torch.expm1(-2 * half_bin * inverse_scale))
        log_upper = torch.where(value > 1 - half_bin, 0.0, nn.functional.logsigmoid(upper))
        log_lower = torch.where(value < half_bin, 0.0, nn.functional.logsigmoid(-lower))
        at_end = (value > 1 - half_bin) | (value < half_bin)
        return log_upper + log_lower + torch.where(at_end, 0.0, log_width)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw levels."""
        with torch.no_grad():
            shape = torch.Size(sample_shape) + self.location.shape
            noise = torch.rand(shape, dtype=self.location.dtype, device=self.location.device)
            raw = self.location + self.log_scale.exp() * noise.logit(eps=1e-7)
            return (raw.clamp(0, 1) * 255).round() / 255


def logistic(datum: Datum, sigma: float) -> LogisticLikelihood:
    """For pixels; σ has no meaning here."""
    return LogisticLikelihood()
