"""scvi-tools: a trained SCVI model and its cells, for log p(x) with an error and a verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from mcvae.models.latent_variable_model import LatentVariableModel

__all__ = ["ScviCells", "from_scvi"]

_INDICES = ("batch", "labels", "extra_categorical_covs")
"""Entries of scvi's minibatches that are whole numbers; rows of cells hold them as floats."""


class ScviCells(NamedTuple):
    """A trained model and cells, as `mcvae.evaluate(model, cells)` and `model.score(cells)` take them."""

    model: LatentVariableModel
    """p(x, z | y): counts x, given what scvi conditions on."""
    cells: Tensor
    """A row per cell, `[N, G + C]`: its G counts, then the conditions y."""


def from_scvi(model: Any, adata: Any = None, indices: Sequence[int] | None = None) -> ScviCells:
    """The model of a trained `scvi.model.SCVI`, and cells of its AnnData or of another one.

    `get_marginal_ll` of scvi estimates the same quantity by plain importance sampling, without an error. In both, a
    model with observed library sizes (scvi's default) gives log p(x | library size), with the size taken from the cell
    itself. One with `use_observed_lib_size=False` integrates over the size, too: it is the last latent, standardised by
    its prior. Batch, covariates and size factor are conditions as well.

    Args:
        model: a trained `scvi.model.SCVI`, or another whose `module` has the methods of `scvi.module.VAE`: `inference`
            and `generative`, with `_get_inference_input` and `_get_generative_input`.
        adata: other data that are set up alike; those of the model by default.
        indices: which cells; all by default.

    For example, for the first 100 cells:

        adapted, cells = from_scvi(model, indices=range(100))
        result = mcvae.evaluate(adapted, cells)
        result.summary["verdict"], result.column("log_likelihood"), result.column("standard_error")
    """
    module: Any = getattr(model, "module", None)
    for name in ("inference", "generative", "_get_inference_input", "_get_generative_input", "n_latent"):
        if not hasattr(module, name):
            raise TypeError(f"expected a model of scvi-tools, whose module has {name}; got {type(model).__name__}.")
    if not getattr(model, "is_trained", True):
        raise ValueError("the SCVI model is not trained; call its train() first.")
    module, like = module.eval(), next(module.parameters())
    adata = model._validate_anndata(adata)
    chosen = None if indices is None else list(indices)
    batches = list(model._make_data_loader(adata=adata, indices=chosen, batch_size=512))
    parts = {name: torch.cat([batch[name] for batch in batches]).to(like) for name in _given(batches[0])}
    counts = torch.cat([batch["X"] for batch in batches]).to(like)
    if module.use_observed_lib_size and not module.use_size_factor_key:
        empty = (counts.sum(1) <= 0).nonzero()
        if len(empty):
            cell = int(empty[0]) if chosen is None else chosen[int(empty[0])]
            raise ValueError(f"cell {cell} has no counts, and scvi takes the logarithm of their sum. Leave it out.")
        parts["library"] = counts.sum(1, keepdim=True).log()
    layout = _Layout(counts.shape[1], {name: part.shape[1] for name, part in parts.items()})
    conditions = torch.cat(list(parts.values()), 1)
    latent_dim = module.n_latent + (not module.use_observed_lib_size)
    adapted = LatentVariableModel(
        _Encoder(module, layout),
        _Decoder(module, layout),
        latent_dim=latent_dim,
        data_shape=(layout.genes,),
        examples=conditions,
    )
    return ScviCells(adapted, torch.cat([counts, conditions], 1))


def _given(batch: Mapping[str, Tensor | None]) -> list[str]:
    """What the minibatches of scvi hold beside the counts: a number or more for every cell."""
    return [name for name, value in batch.items() if name != "X" and value is not None and value.shape[1]]


@dataclass(frozen=True)
class _Layout:
    """Where a row of numbers keeps the entries of scvi's minibatches."""

    genes: int
    widths: dict[str, int]

    def minibatch(self, conditions: Tensor) -> dict[str, Tensor]:
        """Conditions `[N, C]` by scvi's names."""
        parts = torch.split(conditions, list(self.widths.values()), 1)
        named = zip(self.widths, parts, strict=True)
        return {name: part.round().long() if name in _INDICES else part for name, part in named}


class _Part(nn.Module):
    def __init__(self, module: nn.Module, layout: _Layout):
        super().__init__()
        self.module, self.layout = module, layout


class _Encoder(_Part):
    """q(z | x), and q(library | x) if that is latent."""

    def forward(self, rows: Tensor) -> Distribution:
        scvi: Any = self.module
        batch = self.layout.minibatch(rows[:, self.layout.genes :]) | {"X": rows[:, : self.layout.genes]}
        with torch.random.fork_rng(devices=[]):  # `inference` also samples, which must not move the global stream
            found = scvi.inference(**scvi._get_inference_input(batch))
        mean, scale = found["qz"].loc, found["qz"].scale
        if not scvi.use_observed_lib_size:
            prior_mean, prior_scale = _library_prior(scvi, batch)
            size = found["ql"]
            mean = torch.cat([mean, (size.loc - prior_mean) / prior_scale], 1)
            scale = torch.cat([scale, size.scale / prior_scale], 1)
        return Independent(Normal(mean, scale, validate_args=False), 1)


class _Decoder(_Part):
    """p(x | z, y)."""

    def forward(self, rows: Tensor) -> Distribution:
        scvi: Any = self.module
        width = rows.shape[1] - sum(self.layout.widths.values())
        latents, batch = rows[:, :width], self.layout.minibatch(rows[:, width:])
        library = batch.get("library")
        if not scvi.use_observed_lib_size:
            mean, scale = _library_prior(scvi, batch)
            latents, library = latents[:, :-1], mean + scale * latents[:, -1:]
        z = scvi.z_encoder.z_transformation(latents)  # to the simplex, if latent_distribution is "ln"
        found = scvi.generative(**scvi._get_generative_input(batch, {"z": z, "library": library}))
        return _Cells(found["px"])


def _library_prior(scvi: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and scale of the log library size, `[N, 1]` each."""
    mean, variance = scvi._compute_local_library_params(batch["batch"])
    return mean, variance.sqrt()


class _Cells(Distribution):
    """The genes of a cell together; scvi's distributions are over single genes, and do not know their shape."""

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, genes: Distribution):
        shape = genes.mean.shape
        self.genes = genes
        super().__init__(shape[:1], shape[1:], validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self.genes.mean

    def log_prob(self, value: Tensor) -> Tensor:
        total: Tensor = self.genes.log_prob(value).sum(-1)
        return total

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        return self.genes.sample(sample_shape).clone()  # scvi samples in inference mode; a clone may be differentiated
