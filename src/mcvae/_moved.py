"""Names and module paths of the previous release: they still work, and warn what to write instead."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["MOVED", "RENAMED", "install", "renamed"]

_TO_CORE = (
    "annealing backward bridge diagnostics estimator evidence operators paths proposals randomness recipes schedules "
    "scores step_sizes tuning"
)
MOVED = {f"mcvae.{name}": f"mcvae.core.{name}" for name in _TO_CORE.split()} | {
    "mcvae.bounds": "mcvae.core.bounds mcvae.core.gradients",
    "mcvae.kernels": "mcvae.core.kernels mcvae.core.acceptance",
    "mcvae.data.images": "mcvae.data.splits",
    "mcvae.records": "mcvae.runs.records",
    "mcvae.sweep": "mcvae.experiments.cells",
    "mcvae.experiments.images": "mcvae.experiments.image_tables",
    "mcvae.experiments.ppca": "mcvae.experiments.ppca_gradients",
    "mcvae.experiments.reproduce": "mcvae.experiments.reproduction",
    "mcvae.report.compare": "mcvae.report.comparison mcvae.report.groups",
    "mcvae.report.read": "mcvae.runs.discovery",
    "mcvae.report.records": "mcvae.report.reproductions",
    "mcvae.training.config": "mcvae.runs.config",
    "mcvae.training.demo": "mcvae.experiments.demonstration",
    "mcvae.training.evaluation": "mcvae.training.evaluate_run",
    "mcvae.training.files": "mcvae.training.loading mcvae.training.building mcvae.runs.config mcvae.runs.plain",
    "mcvae.training.methods": "mcvae.runs.method",
    "mcvae.training.storage": "mcvae.runs.storage mcvae.runs.plain",
}
"""New module paths by old one; separated by spaces where an old module became several."""

RENAMED = {"none": "no_control_variate", "Fixed": "FixedStepSizes", "Learned": "LearnedStepSizes"}
"""New public names by old one."""


def renamed(name: str) -> str:
    """The new name, with a warning."""
    new = RENAMED[name]
    warnings.warn(f"mcvae.{name} is now mcvae.{new}; the old name will go.", DeprecationWarning, stacklevel=3)
    return new


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Python makes an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, MOVED[module.__name__]
        if old != "mcvae.recipes":  # a public name that stays
            warnings.warn(f"{old} is now {new}; the old path will go.", DeprecationWarning, stacklevel=2)
        parts = [import_module(path) for path in new.split()]
        if len(parts) == 1:
            sys.modules[old] = parts[0]
        for part in parts[::-1]:  # names of the first win
            vars(module).update({name: getattr(part, name) for name in part.__all__})


def install() -> None:
    """Let Python find modules under their old paths."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
