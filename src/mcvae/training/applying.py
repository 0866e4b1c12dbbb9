"""Apply a trained run to data: its own splits, or another file."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from mcvae.core.bridge import NonFiniteDensityError
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.randomness import seeded_generator
from mcvae.data import Batches, DataError, Standardization, Transform
from mcvae.data.conditions import code
from mcvae.data.own import as_tensor
from mcvae.data.raw import Array, Raw, at_index
from mcvae.data.registry import is_own, read_source
from mcvae.evaluation import Evaluation, Protocol, evaluate
from mcvae.models import LatentVariableModel
from mcvae.runs.config import read_config
from mcvae.runs.storage import RunFolder, check_links, top_level
from mcvae.training.loading import Described, load_run, read_described
from mcvae.training.run_data import prepare

__all__ = ["AppliedRun", "apply_run", "drawn"]


@dataclass(frozen=True, eq=False)
class AppliedRun:
    """A trained model and data for it.

    Args:
        model: the model.
        objective: its estimator.
        batches: data as the model sees them, in their order.
        transform: what was done to them.
        places: where each datum came from, in words.
        seed: of the run.
    """

    model: LatentVariableModel
    objective: AnnealedEstimator
    batches: Batches
    transform: Transform
    places: Callable[[int], str]
    seed: int

    def encode(self, num_states: int = 0) -> dict[str, Array]:
        """Mean and scale of q, `[N, D]`; and states of posterior chains, `[N, num_states, D]`, if asked for."""
        found = defaultdict[str, list[Tensor]](list)
        for index, x in enumerate(self.batches):
            mean, scale = self.model.encode(x)
            found["mean"].append(mean)
            found["scale"].append(scale)
            if num_states:
                noise = seeded_generator("encode", self.seed, index)
                evidence = self.model.score(x, num_samples=max(64, num_states), generator=noise)
                found["states"].append(evidence.posterior(num_states, generator=noise).transpose(0, 1))
        return {name: torch.cat(parts).numpy() for name, parts in found.items()}

    def reconstruct(self) -> dict[str, Array]:
        """Means of p(x | z) at the means of q, and the data beside them, both in the units of the data."""
        originals = torch.cat([self.model.apart(x)[0] for x in self.batches])
        means = torch.cat([self.model.reconstruct(x) for x in self.batches])
        if isinstance(self.transform, Standardization):
            originals, means = self.transform.undone(originals), self.transform.undone(means)
        return {"data": originals.numpy(), "reconstruction": means.numpy()}

    def score(self, protocol: Protocol, memory: float = 1e9) -> Evaluation:
        """log p(x) of every datum with its error; see `mcvae.evaluate`.

        For data unlike any that the encoder has seen, q may have no width. Then all chains start from the prior.
        """
        options: dict[str, Any] = {"simulated": 0, "compare_iwae": False, "memory": memory, "seed": self.seed}
        try:
            return evaluate(self.model, self.batches, protocol=protocol, **options)
        except NonFiniteDensityError:
            model = self.model
            shape, examples = model.data_shape, model.examples
            blind = LatentVariableModel(self._prior, model.decoder, model.prior, data_shape=shape, examples=examples)
            return evaluate(blind, self.batches, protocol=protocol, **options)

    def _prior(self, x: Tensor) -> Distribution:
        prior: Distribution = self.model.prior_like(x.new_empty(self.model.latent_dim or 0))
        expanded: Distribution = prior.expand((len(x),))
        return expanded


def apply_run(folder: str | Path, data: str, *, limit: int | None = None) -> AppliedRun:
    """A run and data for it; nothing is written.

    Args:
        folder: a trained run.
        data: "train", "validation" or "test" of the run's own data, or the path of other data of the same kind.
        limit: at most this many data, the first.
    """
    home = RunFolder(folder, top_level)
    check_links(home.path)
    model, objective = load_run(home.path)
    described, config = read_described(home.path), read_config(home.path)
    if data in ("train", "validation", "test"):
        config, splits = prepare(config, trusted=False)
        rows, places, given = splits.split(data), at_index(data), splits.given_of(data)
    elif is_own(data):
        rows, places, given = _rows(data, described)
    else:
        raise ValueError(f"expected train, validation, test or the path of a file or folder, got {data!r}.")
    if not len(rows):
        raise DataError(f"there are no data in {data}.")
    size, seed, transform = config.data.batch_size, config.run.seed, described.transform
    given = None if given is None else given[:limit]
    batches = Batches(rows[:limit], size, transform, seed=seed, epoch=None, given=given)
    return AppliedRun(model, objective, batches, transform, places, seed)


def _rows(data: str, described: Described) -> tuple[Tensor, Callable[[int], str], Tensor | None]:
    """All rows of a file, checked against what the run was trained on, and where each is."""
    datum, condition = described.datum, [coding.name for coding in described.codings]
    found = read_source(data, size=described.size, condition=condition, whole=True).values()
    parts = [_ordered(raw, described.columns) for raw in found]
    tensors = [as_tensor(raw, datum.kind) for raw in parts]  # type: ignore[arg-type]
    for raw, tensor in zip(parts, tensors, strict=True):
        if tuple(tensor.shape[1:]) != datum.shape:
            raise DataError(
                f"{raw.place(0)}: the run was trained on data of shape {list(datum.shape)}, got "
                f"{list(tensor.shape[1:])}."
            )
        if datum.kind == "counts" and described.bounded and int(tensor.max()) >= datum.levels:
            row = int((tensor.flatten(1).amax(1) >= datum.levels).nonzero()[0])
            raise DataError(
                f"{raw.place(row)}: the run knows whole numbers up to {datum.levels - 1}, got {int(tensor[row].max())}."
            )
    ends = np.cumsum([len(tensor) for tensor in tensors])

    def place(row: int) -> str:
        part = int(np.searchsorted(ends, row, side="right"))
        return parts[part].place(row - int(ends[part - 1] if part else 0))

    given = [code(described.codings, raw.conditions, raw.place) for raw in parts] if condition else []
    return torch.cat(tensors), place, torch.cat(given) if given else None


def _ordered(raw: Raw, columns: list[str]) -> Raw:
    """The columns that the run knows, in its order; others are left out."""
    if not columns or not raw.columns:
        return raw
    missing = [name for name in columns if name not in raw.columns]
    if missing:
        raise DataError(f"{raw.place(0)}: the column {missing[0]!r}, which the run was trained on, is missing.")
    order = [list(raw.columns).index(name) for name in columns]
    return raw._replace(values=raw.values[:, order], columns=columns)


def drawn(model: LatentVariableModel, described: Described, number: int, seed: int) -> dict[str, Tensor]:
    """Data from a model: latents z of the prior, means of p(x | z) and draws from it, in the units of the data."""
    with torch.no_grad():
        x, z = model.simulate(number, generator=seeded_generator("sample", seed))
        x, y = model.apart(x)
        mean = model.decode(z, y).mean
    if isinstance(described.transform, Standardization):
        x, mean = described.transform.undone(x), described.transform.undone(mean)
    return {"mean": mean, "x": x, "z": z} | ({} if y is None else {"y": y})
