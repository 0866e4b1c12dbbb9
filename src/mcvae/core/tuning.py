"""What pilot chains found: temperatures and step sizes for any number of temperatures, to be used, saved and loaded."""

import json
from os import PathLike
from pathlib import Path as File
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mcvae.core.frames import Frame
from mcvae.core.kernels import Kernel
from mcvae.core.schedules import LinearSchedule, SigmoidSchedule
from mcvae.core.step_sizes import FixedStepSizes, RelativeStepSizes

__all__ = ["Spacing", "Tuning", "spaced"]

Spacing = Literal["adaptive", "sigmoid", "linear"]
"""How temperatures are spaced: by equal losses of conditional effective sample size as the pilot saw them, or fixed."""


class Tuning(NamedTuple):
    """What pilot chains found, for any number of temperatures."""

    knots: Tensor
    """Temperatures of the pilot, `[M]`."""
    log_steps: Tensor
    """Log step sizes there, in units of the initial distribution's scales: `[M, 1]`, or `[M, B]` for one per datum."""
    spread: Tensor
    """Spread of ∂ log γ_β / ∂β at 0 and there, `[M + 1]`: the rate at which weights drift apart."""
    spacing: Spacing = "adaptive"
    reached: float = 1.0
    """Temperature at which the pilot stopped for want of knots; 1 if it reached the end."""
    frame: Frame | None = None
    """Coordinates in which chains start from N(0, I), if the pilot found a better start than the initial one."""
    fitted: bool = False
    """Whether chains start around a mode of their own density; without a `frame`, one is fitted to the data at hand."""

    @property
    def length(self) -> float:
        """How far the densities are apart: the spread, integrated over temperatures.

        The relative variance of weights is at best its square over the number of temperatures.
        """
        grid = torch.cat([self.knots.new_zeros(1), self.knots, self.knots.new_ones(1)])
        spread = torch.cat([self.spread, self.spread[-1:]])
        return float(((spread[1:] + spread[:-1]) / 2 * grid.diff()).sum())

    def temperatures(self, num_steps: int) -> Tensor:
        """K interior temperatures, `[K]`.

        A small step Δβ costs a share (Δβ · spread)² of the conditional effective sample size; the adaptive ladder makes
        all these losses equal.
        """
        if self.spacing != "adaptive" or num_steps == 0:
            return spaced("linear" if self.spacing == "linear" else "sigmoid", num_steps)
        knots, spread = self.knots.double().cpu(), self.spread.double().cpu()
        grid = torch.cat([knots.new_zeros(1), knots, knots.new_ones(1)])
        spread = torch.cat([spread, spread[-1:]])
        length = torch.cat([knots.new_zeros(1), ((spread[1:] + spread[:-1]) / 2 * grid.diff()).cumsum(0)])
        return _interpolate(length[-1] * spaced("linear", num_steps), length, grid)

    def step_sizes(self, betas: Tensor) -> Tensor:
        """Step sizes at `betas [K]` in units of the initial distribution's scales, `[K, 1]` or `[K, B]`."""
        return _interpolate(betas.to(self.knots), self.knots, self.log_steps).exp()

    def relative_step_sizes(self, kernel: Kernel, betas: Tensor) -> RelativeStepSizes:
        """Frozen step sizes at `betas [K]`, in units of the scales of the initial distribution they are used on."""
        return RelativeStepSizes(FixedStepSizes(len(betas), self.step_sizes(betas)), kernel.step_unit)

    def shared(self) -> "Tuning":
        """One step size for all data, the median, and no frame: for data that the pilot did not see."""
        return self._replace(log_steps=self.log_steps.median(1, keepdim=True).values, frame=None)

    def save(self, path: str | PathLike[str]) -> None:
        """Write as JSON."""
        content = {name: getattr(self, name).tolist() for name in ("knots", "log_steps", "spread")}
        frame: dict[str, Any] | None = None
        if self.frame is not None:  # chains that start there have its type
            frame = {name: value.tolist() for name, value in self.frame._asdict().items()}
            frame["dtype"] = str(self.frame.mean.dtype).removeprefix("torch.")
        content |= {"spacing": self.spacing, "reached": self.reached, "frame": frame, "fitted": self.fitted}
        File(path).write_text(json.dumps(content) + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Tuning":
        """Read what `save` wrote."""
        content = json.loads(File(path).read_text())
        knots, log_steps, spread = (
            torch.tensor(content[name], dtype=torch.float64) for name in ("knots", "log_steps", "spread")
        )
        frame = content.get("frame")
        if frame is not None:
            dtype = getattr(torch, frame.get("dtype", "float32"))
            frame = Frame(*(torch.tensor(frame[name], dtype=dtype) for name in Frame._fields))
        fitted = content.get("fitted", frame is not None)
        return cls(knots, log_steps, spread, content["spacing"], content.get("reached", 1.0), frame, fitted)


def spaced(spacing: Literal["sigmoid", "linear"], num_steps: int) -> Tensor:
    """K interior temperatures by a rule, `[K]`, float64."""
    rule = LinearSchedule if spacing == "linear" else SigmoidSchedule
    with torch.device("cpu"):
        return rule(num_steps, interior=True).double()().detach()


def _interpolate(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Piecewise linear y(x) at `at [K]`, constant outside; y is `[M]` or `[M, B]`, x increasing."""
    if len(x) == 1:
        return y.expand(len(at), *y.shape[1:])
    right = torch.searchsorted(x.contiguous(), at.contiguous()).clamp(1, len(x) - 1)
    share = ((at - x[right - 1]) / (x[right] - x[right - 1]).clamp(min=1e-12)).clamp(0, 1)
    share = share.reshape(-1, *[1] * (y.dim() - 1))
    return (1 - share) * y[right - 1] + share * y[right]
