"""The public names, and where they live."""

from .batches import Batches as Batches
from .registry import (
    DATASETS as DATASETS,
    SOURCES as SOURCES,
    Dataset as Dataset,
    Source as Source,
    check_source as check_source,
    data_root as data_root,
    load_data as load_data,
    load_images as load_images,
)
from .splits import DataError as DataError, Images as Images, Splits as Splits
from .transforms import (
    TRANSFORMS as TRANSFORMS,
    Standardization as Standardization,
    Transform as Transform,
    binarize as binarize,
    dequantize as dequantize,
    keep as keep,
    scale as scale,
)
