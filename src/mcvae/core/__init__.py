"""The algorithm: bridges, kernels, chains and their weights, bounds and gradients. Needs torch and nothing else."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["recipes"])
