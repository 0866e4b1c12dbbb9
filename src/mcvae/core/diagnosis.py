"""What weighted chains say: an estimate of the evidence, what speaks against it, and samples of the posterior."""

from collections.abc import Callable
from importlib import import_module
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from mcvae.core.annealing import moved_on
from mcvae.core.bridge import Bridge
from mcvae.core.checks import Checks
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.frames import Frame
from mcvae.core.resampling import systematic
from mcvae.core.tuning import Tuning
from mcvae.core.verdict import verdict

__all__ = ["Evidence", "Sandwich"]


class Evidence(NamedTuple):
    """An estimate of log p(x) for every datum, with what is needed to doubt it."""

    log_evidence: Tensor
    """log of the mean weight, `[B]`: below log p(x) in expectation (Jensen)."""
    standard_error: Tensor
    """Standard error of `log_evidence`, `[B]`."""
    ess: Tensor
    """Effective sample size, `[B]`, between 1 and S."""
    pareto_k: Tensor
    """Tail shape of the weights, `[B]`; above 0.7 do not trust the estimate. NaN for 20 samples or fewer."""
    acceptance: Tensor
    """Mean acceptance, `[B]`; hypothetical for unadjusted kernels, NaN without steps."""
    acceptance_per_step: Tensor
    """Acceptance of every step, `[K, B]`."""
    num_nonfinite: Tensor
    """Chains that met a density they could not evaluate, `[B]`; they count, with weight 0 or a rejection."""
    log_weights: Tensor
    """`[S, B]`, float64."""
    latents: Tensor
    """Where the chains ended, `[S, B, D]`, with weights `log_weights`."""
    estimator: AnnealedEstimator
    """The frozen estimator whose chains these are."""
    bridge: Bridge
    """The densities."""
    moved: Tensor
    """By how much the estimate rose when the number of temperatures was last doubled, `[B]`; NaN if it was given."""
    tuning: Tuning | None
    """What the pilot found; hand it to `tuning=` to use it again."""
    tolerance: float
    """How far, in nats, `moved` may be from 0 in a converged estimate."""
    resolution: Tensor
    """Rounding of the log density at the end states, in nats, `[B]`."""
    checks: Checks | None = None
    """What independent witnesses found; None if they were not asked."""

    @property
    def num_steps(self) -> int:
        """K."""
        return self.estimator.num_steps

    @property
    def temperatures(self) -> Tensor:
        """The temperatures used, `[K]`."""
        return self.estimator.schedule().detach()

    @property
    def step_sizes(self) -> Tensor:
        """The step sizes used: what was given, or `[K, B, D]`, in the coordinates of `frame`."""
        return self.estimator.step_sizes(self._run_bridge.initial).detach()

    @property
    def frame(self) -> Frame | None:
        """Coordinates in which the chains ran, if the pilot found a better start; else those of the latents."""
        return None if self.tuning is None else self.tuning.frame

    @property
    def _run_bridge(self) -> Bridge:
        return self.bridge if self.frame is None else self.frame.bridge(self.bridge)

    def posterior(self, num_samples: int, *, num_moves: int = 10, generator: Generator | None = None) -> Tensor:
        """Equally weighted samples of the posterior, `[N, B, D]`.

        The end states are resampled by their weights. Where that makes copies, moves that leave the posterior
        invariant pull them apart; a kernel without accept/reject does not make any. Samples are as good as the
        weights: look at `verdict()` first.

        Args:
            num_samples: N.
            num_moves: of the estimator's last kernel at β = 1, if it accepts and rejects.
            generator: source of all randomness.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}.")
        if not bool(self.log_evidence.isfinite().all()):
            raise ValueError("there is no posterior sample of a datum whose chains all have weight 0.")
        rows = systematic(self.log_weights, num_samples, generator)
        z = self.latents.gather(0, rows.unsqueeze(-1).expand(-1, -1, self.latents.shape[-1]))
        frame, moves = self.frame, self.estimator.moves
        if not moves or not moves[-1].accepts or not num_moves:
            return z
        z = z if frame is None else frame.from_latents(z)
        z = moved_on(self._run_bridge, moves[-1], z, self.step_sizes[-1], num_moves, generator).z
        return z if frame is None else frame.to_latents(z)

    def expectation(self, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """E[f(z)] under the posterior, and its standard error, `[B, ...]` each: a weighted mean over the chains.

        Args:
            function: f, `[S, B, D] -> [S, B, ...]`.

        >>> import mcvae
        >>> from torch.distributions import Independent, Normal
        >>> initial = Independent(Normal(torch.zeros(1, 2), 2 * torch.ones(1, 2)), 1)
        >>> e = mcvae.estimate_log_evidence(lambda z: -0.5 * (z - 1).square().sum(-1), initial, seed=0)
        >>> mean, error = e.expectation(lambda z: z)
        >>> bool(((mean - 1).abs() < 4 * error).all())
        True
        """
        values = function(self.latents).double()
        if values.shape[:2] != self.log_weights.shape:
            raise ValueError(
                f"function must return [S, B, ...] = {list(self.log_weights.shape)} and more, got "
                f"{list(values.shape)}. It gets latents [S, B, D] and must keep the first two dimensions."
            )
        share = self.log_weights.softmax(0).to(values).reshape(*self.log_weights.shape, *[1] * (values.dim() - 2))
        values = torch.where(share > 0, values, 0.0)  # f need not exist where the posterior has no mass
        mean, resample = (share * values).sum(0), self.estimator.resample
        number = len(share) if resample is None else resample.islands  # within an island chains are copies
        parts = torch.unflatten(share * (values - mean), 0, (number, -1)).sum(1)
        if number < 2:
            return mean, torch.full_like(mean, torch.inf)
        return mean, parts.square().sum(0).sqrt() * (number / (number - 1)) ** 0.5

    def to_arviz(self, num_samples: int = 1000, *, name: str = "z", generator: Generator | None = None) -> Any:
        """Posterior samples as `arviz.InferenceData`: one chain of N draws, `[D]` each, or `[B, D]` of several data.

        Needs the extra `mcvae[arviz]`. Draws are resampled, so they are equally weighted, and copies count as such.

        Args:
            num_samples: N.
            name: of the variable.
            generator: source of all randomness.
        """
        try:
            arviz: Any = import_module("arviz")
        except ImportError as error:
            raise ImportError("e.to_arviz() needs ArviZ: pip install 'mcvae[arviz]'.") from error
        draws = self.posterior(num_samples, generator=generator)
        draws = draws.squeeze(1) if draws.shape[1] == 1 else draws
        found = arviz.from_dict(posterior={name: draws.detach().cpu().numpy()[None]})
        found.posterior.attrs.update(
            log_evidence=self.log_evidence.tolist(),
            standard_error=self.standard_error.tolist(),
            verdict=self.verdict(),
        )
        return found

    @property
    def confirmed(self) -> Tensor:
        """Whether independent evidence was asked for, and precise enough to agree or not, `[B]`, bool."""
        if self.checks is None:
            return torch.zeros_like(self.log_evidence, dtype=torch.bool)
        return self.checks.standard_error <= 3 * self.tolerance

    @property
    def converged(self) -> Tensor:
        """Whether nothing speaks against the estimate of a datum, and independent evidence for it, `[B]`, bool."""
        sound = torch.tensor([not found for found in self.doubts()], device=self.log_evidence.device)
        return sound & self.confirmed

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Interval for log p(x) from the spread of the chains, `[B]` each. Believe it only if `converged`."""
        half = NormalDist().inv_cdf(0.5 + level / 2) * self.standard_error
        return self.log_evidence - half, self.log_evidence + half

    def doubts(self) -> list[tuple[str, ...]]:
        """For every datum, the names of what speaks against its estimate: keys of `ADVICE`."""
        num_samples = len(self.log_weights)
        noise = 2.8 * self.standard_error  # twice the error of a difference
        share = self.ess / num_samples
        failing = {
            "empty": ~self.log_evidence.isfinite(),
            "broken": self.num_nonfinite > 0.01 * num_samples,
            "coarse": self.resolution > self.tolerance,
            "stuck": self.acceptance < 0.375 * self.estimator.target_acceptance,
            "unfinished": torch.full_like(share, self.tuning is not None and self.tuning.reached < 1, dtype=torch.bool),
            **self._contradictions(),
            "moving": self.moved.abs() > self.tolerance + noise,
            "few": self.ess < max(2.0, 0.1 * num_samples),
            # of nearly equal weights k is mostly noise, and at last rounding
            "tail": (self.pareto_k > torch.where(share < 0.5, 0.7, 1.0)) & (share < 0.99),
            "noisy": ~(self.standard_error <= 2 * self.tolerance),
        }
        flags = torch.stack(list(failing.values()), 1).tolist()
        return [tuple(name for name, flag in zip(failing, row, strict=True) if flag) for row in flags]

    def _contradictions(self) -> dict[str, Tensor]:
        """What independent witnesses say against the estimate, `[B]` each."""
        if self.checks is None:
            return {}
        gap, error = self.checks.gap(self.log_evidence, self.standard_error)
        return {
            "elsewhere": self.checks.strays > 0.02,  # more than one of 64 chains
            "hidden": self.checks.hidden > 0.15,
            "disagreeing": gap > 3 * error + 0.5 * self.tolerance,
            "drifting": self.checks.drift > 5,
        }

    def verdict(self) -> str:
        """One sentence for all data: converged, no contradiction found, or not converged, why and what to do."""
        return verdict(self.doubts(), self.confirmed.tolist())


class Sandwich(NamedTuple):
    """Stochastic bounds on log p(x) from both sides; all but the last two are `[B]`."""

    lower: Tensor
    upper: Tensor
    gap: Tensor
    """`upper - lower`: in expectation at least the error of either."""
    forward: Evidence
    """The chains behind `lower`."""
    reverse: Evidence
    """The reversed chains: an estimate of log 1/p(x). Standard error, ESS and k̂ are NaN if all chains of a datum
    started from one posterior sample: they are not independent."""
