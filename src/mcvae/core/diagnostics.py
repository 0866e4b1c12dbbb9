"""Can these weights be trusted? Effective sample size, standard error of log p̂, Pareto k̂."""

import math

import torch
from torch import Tensor

__all__ = ["effective_sample_size", "jackknife_bias", "pareto_k", "standard_error"]


def effective_sample_size(log_weight: Tensor) -> Tensor:
    """(Σw)² / Σw² over samples, `[S, B] -> [B]`: between 1 and S; 0 if every weight is 0.

    >>> effective_sample_size(torch.zeros(8, 1))
    tensor([8.])
    """
    return (2 * log_weight.logsumexp(0) - (2 * log_weight).logsumexp(0)).exp().nan_to_num(nan=0.0)


def standard_error(log_weight: Tensor) -> Tensor:
    """Standard error of log p̂ = log mean w by the delta method, `[S, B] -> [B]`; inf for one sample.

    It cannot exceed 1: where one weight outweighs all others it says 1 and the truth may be anything. Believe it only
    together with `effective_sample_size` and `pareto_k`.

    >>> standard_error(torch.zeros(8, 1))
    tensor([0.])
    """
    num_samples = log_weight.shape[0]
    if num_samples < 2:
        return torch.full_like(log_weight[0], torch.inf)
    share = log_weight.softmax(0)  # w_i / Σw
    variance = (share - 1 / num_samples).square().sum(0) * num_samples / (num_samples - 1)
    return variance.sqrt().nan_to_num(nan=torch.inf)


def jackknife_bias(log_weight: Tensor) -> Tensor:
    """By how much log p̂ = log mean w is too low in expectation, by the jackknife, `[S, B] -> [B]`.

    Add it to correct the bias of Jensen's inequality to first order, about half of the relative variance of p̂. inf if
    there are fewer than two chains, or one has all the weight: then nothing can be said.

    >>> jackknife_bias(torch.zeros(8, 1))
    tensor([0.])
    """
    num_samples = log_weight.shape[0]
    if num_samples < 2:
        return torch.full_like(log_weight[0], torch.inf)
    shortfall = math.log1p(-1 / num_samples) - torch.log1p(-log_weight.softmax(0))  # log p̂ - log p̂ without a chain
    bias: Tensor = (num_samples - 1) * shortfall.mean(0)
    return bias.nan_to_num(nan=torch.inf).relu()


def pareto_k(log_weight: Tensor) -> Tensor:
    """Shape k̂ of a generalised Pareto fitted to the largest weights, `[S, B] -> [B]` (Vehtari et al.).

    The tail is the largest min(S/5, 3√S) weights. Below 0.5 the weights have a finite variance and `standard_error`
    means what it says; above 0.7 neither does. 0 if the tail has no spread, inf if a few weights are all there is or
    none is finite, NaN if the tail has fewer than five weights (S ≤ 20).

    >>> generator = torch.Generator().manual_seed(0)
    >>> light = torch.rand(10_000, 1, generator=generator)
    >>> bool(pareto_k(light) < 0.5)
    True
    """
    num_samples = log_weight.shape[0]
    tail = math.ceil(min(num_samples / 5, 3 * math.sqrt(num_samples)))
    if tail < 5:
        return torch.full_like(log_weight[0], torch.nan)
    ordered = (log_weight - log_weight.amax(0)).exp().sort(0).values
    excess = ordered[-tail:] - ordered[-tail - 1]
    no_spread = (excess[-1] == 0) & log_weight.amax(0).isfinite()
    fitted = torch.where(excess[_quartile(tail)] > 0, _fit_generalised_pareto(excess), torch.inf)
    return torch.where(no_spread, 0.0, fitted.nan_to_num(nan=torch.inf, posinf=torch.inf))


def _quartile(num: int) -> int:
    """Index of the first quartile of `num` sorted values."""
    return int(num / 4 + 0.5) - 1


def _fit_generalised_pareto(excess: Tensor) -> Tensor:
    """Shape by the empirical Bayes fit of Zhang and Stephens (2009), `[N, B]` sorted -> `[B]`."""
    num = excess.shape[0]
    largest, quartile = excess[-1], excess[_quartile(num)]
    grid_size = 30 + int(math.sqrt(num))
    grid = torch.arange(1, grid_size + 1, dtype=excess.dtype, device=excess.device).unsqueeze(-1) - 0.5
    theta = 1 / largest + (1 - (grid_size / grid).sqrt()) / (3 * quartile)  # [G, B]
    shapes = torch.log1p(-theta.unsqueeze(1) * excess).mean(1)  # [G, B]
    log_likelihood = num * ((-theta / shapes).log() - shapes - 1)
    theta_hat = (log_likelihood.softmax(0) * theta).sum(0)
    shape = torch.log1p(-theta_hat * excess).mean(0)
    prior_weight, prior_shape = 10.0, 0.5  # the weak prior of Vehtari et al. (2024), for small tails
    return (num * shape + prior_weight * prior_shape) / (num + prior_weight)
