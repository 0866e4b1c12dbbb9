"""Data sets of images in memory, and batches of them as a likelihood needs them.

Names are imported when first used: those of `DATASETS` are known without torch. `__init__.pyi` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
