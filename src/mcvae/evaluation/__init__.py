"""Likelihoods of whole data sets: estimated, certified, and resumed after an interruption."""

from mcvae.evaluation.certificate import Certificate
from mcvae.evaluation.portions import bytes_per_row, evenly_spaced
from mcvae.evaluation.procedure import Evaluation, evaluate, write_table
from mcvae.evaluation.protocol import COLUMNS, PROTOCOLS, WEIGHT_EDGES, Protocol
from mcvae.evaluation.resume import remove_saved

__all__ = [
    "COLUMNS",
    "PROTOCOLS",
    "WEIGHT_EDGES",
    "Certificate",
    "Evaluation",
    "Protocol",
    "bytes_per_row",
    "evaluate",
    "evenly_spaced",
    "remove_saved",
    "write_table",
]
