"""Monte Carlo variational auto-encoders: tight bounds, unbiased gradients, log-likelihoods to trust.

Names are imported when first used, so that `mcvae --help` need not wait for torch. `__init__.pyi` lists them.
"""

from importlib import import_module
from typing import Any

import lazy_loader

from mcvae import _moved
from mcvae._extras import needs_extra

_lazy_getattr, _public_names, __all__ = lazy_loader.attach_stub(__name__, __file__)
_moved.install()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("mcvae")
    if name in _moved.RENAMED:
        return getattr(import_module(__name__), _moved.renamed(name))
    if name not in __all__ and f"mcvae.{name}" in _moved.MOVED:
        return import_module(f"mcvae.{name}")
    with needs_extra(f"mcvae.{name}"):
        return _lazy_getattr(name)


def __dir__() -> list[str]:
    return [*_public_names(), "__version__"]
