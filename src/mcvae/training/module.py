"""The training step as a Lightning module: any model, any estimator, one optimiser."""

import math
import warnings
from typing import Any

import torch
import torch.distributed
from lightning import LightningModule
from torch import Tensor, optim

from mcvae.core.annealing import Trajectory
from mcvae.core.bridge import NonFiniteDensityError
from mcvae.core.estimator import AnnealedEstimator, Estimate
from mcvae.core.randomness import seeded_generator
from mcvae.models import LatentVariableModel
from mcvae.runs.config import OptimizerConfig
from mcvae.training.threads import recall_threads

__all__ = ["DivergedError", "VariationalTraining"]


_MIXING = (torch.nn.modules.batchnorm._BatchNorm,)
"""Layers through which the rows of a batch influence each other in training."""

_KINDS = (optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.SGD)
OPTIMIZERS: dict[str, Any] = {kind.__name__.lower(): kind for kind in _KINDS}
"""Optimisers by name."""


class DivergedError(RuntimeError):
    """Too many steps in a row had a loss or gradient that was not finite."""


class VariationalTraining(LightningModule):
    """Maximise a Monte Carlo bound.

    The random numbers of a step depend only on (seed, epoch, batch) and on a row's place in the batch, which the
    processes share in equal parts. So a resumed run continues bit for bit, and the number of processes does not matter.

    Args:
        model: what is trained.
        objective: the bound; its learnable parts are trained, its step sizes adapted after each finite step.
        config: the optimiser.
        seed: of the chains' noise.
        epochs: planned length of training, for the learning-rate schedule.
        log_every: optimiser steps between points of the logger.
        bridge: options of `LatentVariableModel.bridge`, such as `memory="low"`.
    """

    def __init__(
        self,
        model: LatentVariableModel,
        objective: AnnealedEstimator,
        config: OptimizerConfig,
        *,
        seed: int = 0,
        epochs: int = 1,
        log_every: int = 50,
        **bridge: Any,
    ):
        super().__init__()
        self.model, self.objective, self.config = model, objective, config
        self.seed, self.epochs, self.log_every, self.bridge_options = seed, epochs, log_every, bridge
        self.register_buffer("skipped", torch.tensor(0))
        self.skipped_in_a_row = 0
        self._estimate: Estimate | None = None
        self._seen = list[Tensor]()
        self._validation = list[Tensor]()

    skipped: Tensor
    """Steps that were not taken because loss or gradient was not finite."""

    def on_fit_start(self) -> None:
        """Warn of batch normalisation, through which rows of a batch influence each other: scores would mix them."""
        mixing = [name for name, layer in self.model.named_modules() if isinstance(layer, _MIXING)]
        if mixing and self.num_steps:
            warnings.warn(
                f"{', '.join(mixing)}: batch normalisation lets the rows of a batch influence each other, so that the "
                "score of a chain depends on the other chains, and the bound does not hold. Use group or layer "
                "normalisation.",
                stacklevel=2,
            )

    def configure_optimizers(self) -> Any:
        """The optimiser over everything that can be learned, its rate a function of the epoch."""
        config = self.config
        learned = [p for p in self.parameters() if p.requires_grad]
        try:
            optimizer = OPTIMIZERS[config.name](learned, lr=config.learning_rate, **config.settings)
        except (TypeError, ValueError) as error:
            raise ValueError(f"--optimizer.settings do not suit {config.name}: {error}.") from None

        def factor(epoch: int) -> float:
            rising = min(1.0, (epoch + 1) / (config.warmup + 1))
            if config.schedule == "cosine":
                return rising * 0.5 * (1 + math.cos(math.pi * min(1.0, epoch / self.epochs)))
            if config.schedule == "constant":
                return rising
            return rising * config.decay ** sum(epoch >= fraction * self.epochs for fraction in config.milestones)

        return {"optimizer": optimizer, "lr_scheduler": optim.lr_scheduler.LambdaLR(optimizer, factor)}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss of one batch; NaN, with a NaN gradient, where the model cannot be evaluated."""
        estimate, seen = None, self._unknown(1 + self.num_steps)
        try:
            weight = self.kl_weight
            bridge = self.model.bridge(batch, kl_weight=weight, **self.bridge_options)
            estimate = self.objective(bridge, generator=self._generator("train", batch_idx, shared=True))
            bound, acceptance = weight * estimate.bound.mean(), estimate.trajectory.acceptance.mean(1)
            seen = torch.cat([bound.unsqueeze(0), acceptance.to(bound)])
        except ValueError as error:
            if not _means_non_finite(error):
                raise
        self._seen.append(seen)  # stays on the device until the epoch's end
        if (self.global_step + 1) % self.log_every == 0:
            self._log_step(seen)
        if estimate is None or not bool(seen[0].isfinite()):
            return self._no_loss()
        self._estimate = estimate
        return weight * estimate.loss.mean()

    @property
    def kl_weight(self) -> float:
        """β, the weight of the KL divergence in this epoch."""
        return min(1.0, (self.current_epoch + 1) / (self.config.kl_warmup + 1))

    def _log_step(self, seen: Tensor) -> None:
        bound, *accepted = _over_ranks(seen).mean(0).float()
        if bool(bound.isfinite()):
            self.log("step/bound", bound, prog_bar=True)
            if self.num_steps:
                self.log("step/acceptance", torch.stack(accepted).mean(), prog_bar=True)
                self.log("step/step_size", self._step_sizes().mean())

    @property
    def num_steps(self) -> int:
        """K."""
        return self.objective.schedule.num_steps

    def _step_sizes(self) -> Tensor:
        """Of every transition, averaged over dimensions, `[K]`."""
        return self.objective.step_sizes().detach().float().reshape(self.num_steps, -1).mean(1)

    def _unknown(self, number: int) -> Tensor:
        """NaNs of the type that bounds have."""
        dtype = torch.float32 if self.device.type == "mps" else torch.float64  # Apple GPUs have no float64
        return torch.full((number,), torch.nan, dtype=dtype, device=self.device)

    def _no_loss(self) -> Tensor:
        """NaN, with a NaN gradient: averaged over processes it makes all of them skip the step."""
        return torch.stack([p.sum() for p in self.parameters() if p.requires_grad]).sum() * math.nan

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Clip the gradient. A step whose gradient is not finite is skipped and counted; too many end training."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.clip or math.inf)
        if bool(norm.isfinite()):
            self.skipped_in_a_row = 0
            return
        for parameter in parameters:
            parameter.grad = None  # so that Adam leaves parameter and momentum alone
        self._estimate = None
        self.objective.step_sizes.shorten()  # otherwise the next step would diverge as well
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row in (1, self.config.patience):
            self._complain()

    def _complain(self) -> None:
        cause = (
            "The parameters themselves are not finite: an earlier step has ruined them."
            if not all(bool(p.isfinite().all()) for p in self.parameters())
            else "Likely causes: step sizes too long for this model (try --method.step_size 0.001), a learning rate "
            "too high (try --optimizer.learning_rate 0.0003), or a likelihood whose scale collapses."
        )
        where = f"epoch {self.current_epoch}, step {self.global_step}"
        if self.skipped_in_a_row < self.config.patience:
            self.print(f"\nwarning: loss or gradient not finite in {where}; the step is skipped. {cause}")
            return
        raise DivergedError(f"{self.config.patience} non-finite steps in a row, last in {where}. {cause}")

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        """Adapt the step sizes, on what all ranks saw together."""
        if self._estimate is not None:
            trajectory = _pooled(self._estimate.trajectory)
            self.objective.adapt(self._estimate._replace(trajectory=trajectory))
            self._estimate = None

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """The bound of one validation batch; changes nothing."""
        if not len(batch):  # another process has it
            return
        try:
            estimate = self.objective(self.model.bridge(batch), generator=self._generator("validation", batch_idx))
            self._validation.append(estimate.bound)
        except ValueError as error:
            if not _means_non_finite(error):
                raise
            self._validation.append(self._unknown(len(batch)))

    def on_validation_epoch_end(self) -> None:
        """Log the validation bound, the mean over the images of all processes."""
        bounds = torch.cat([self._unknown(0), *self._validation])
        total, number = _over_ranks(torch.stack([bounds.sum(), bounds.new_tensor(len(bounds))])).sum(0)
        if number:
            self.log("val_bound", (total / number).float(), prog_bar=True)
        if bool(total == -torch.inf):
            lost = int((bounds == -torch.inf).sum())
            self.print(
                f"\nwarning: the chains of {lost} of {len(bounds)} validation data diverged in epoch "
                f"{self.current_epoch}, so their bound is -inf. If that lasts, try --method.step_size 0.001."
            )
        self._validation.clear()

    def on_train_epoch_end(self) -> None:
        """Log the means over the epoch's finite steps, and acceptance and step size of every transition."""
        seen = _over_ranks(torch.stack(self._seen)).mean(0) if self._seen else self._unknown(1).unsqueeze(0)
        finite = seen[seen[:, 0].isfinite()]
        if len(finite):
            bound, *accepted = finite.mean(0).float()
            self.log("train_bound", bound)
            if self.num_steps:
                self.log("acceptance", torch.stack(accepted).mean())
                self.log("step_size", self._step_sizes().mean())
                for k, (rate, size) in enumerate(zip(accepted, self._step_sizes(), strict=True), 1):
                    self.log(f"acceptance/{k}", rate)
                    self.log(f"step_size/{k}", size)
        self._seen.clear()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save how many steps in a row were skipped, and the number of threads."""
        checkpoint["skipped_in_a_row"] = self.skipped_in_a_row
        checkpoint["threads"] = torch.get_num_threads()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore both."""
        self.skipped_in_a_row = checkpoint.get("skipped_in_a_row", 0)
        recall_threads(checkpoint.get("threads"))

    def _generator(self, purpose: str, batch_idx: int, shared: bool = False) -> torch.Generator:
        """The generator of a batch that this process has to itself, or shares with the others."""
        epoch = self.current_epoch if purpose == "train" else 0
        place = {"rank": self.global_rank, "world_size": self.trainer.world_size} if shared else {}
        return seeded_generator(purpose, self.seed, epoch, batch_idx, 0, device=self.device, **place)


def _means_non_finite(error: ValueError) -> bool:
    """Whether the error is ours, or that of a torch distribution whose parameters are NaN or have underflowed."""
    return isinstance(error, NonFiniteDensityError) or str(error).startswith("Expected parameter")


def _over_ranks(values: Tensor) -> Tensor:
    """The values of all processes, stacked: `[...] -> [world_size, ...]`."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return values.unsqueeze(0)
    parts = [torch.empty_like(values) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, values.contiguous())
    return torch.stack(parts)


def _pooled(trajectory: Trajectory) -> Trajectory:
    """The statistics that step sizes adapt to, pooled over processes, so that every rank adapts alike."""
    acceptance, log_weight = _over_ranks(trajectory.acceptance), _over_ranks(trajectory.log_weight.detach())
    pooled = trajectory._replace(
        acceptance=torch.cat([*acceptance], 1),  # [K, B]
        log_weight=torch.cat([*log_weight], 1),  # [S, B]
    )
    if trajectory.score_std is None or trajectory.score_mean is None or len(acceptance) == 1:
        return pooled
    within = _over_ranks(trajectory.score_std).square().mean(0)
    between = _over_ranks(trajectory.score_mean).var(0, correction=0)
    return pooled._replace(score_std=(within + between).sqrt())
