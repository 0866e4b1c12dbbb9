"""The public names, and where they live."""

from .batches import Batches as Batches
from .images import DataError as DataError, Images as Images
from .registry import (
    DATASETS as DATASETS,
    Dataset as Dataset,
    data_root as data_root,
    load_images as load_images,
)
from .transforms import (
    TRANSFORMS as TRANSFORMS,
    Transform as Transform,
    binarize as binarize,
    dequantize as dequantize,
    scale as scale,
)
