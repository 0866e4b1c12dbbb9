"""Where do chains pay? One budget of decoder passes per image, spent as samples, as steps, or as both."""

from typing import Any

from mcvae.experiments.cell import Cell
from mcvae.experiments.image_tables import SIMULATED, training_cells
from mcvae.experiments.paper import ReproductionOptions
from mcvae.runs.config import DataConfig, ModelConfig, TrainConfig

__all__ = ["ENCODERS", "METHODS", "PRESETS", "cells"]

METHODS = (
    "vae",
    *("iwae-6", "l-mcvae-k2-n2-iwae", "l-mcvae-k5", "a-mcvae-k5", "cmcd-k5"),
    *("iwae-12", "l-mcvae-k2-n4-iwae", "l-mcvae-k5-n2-iwae", "l-mcvae-k11", "a-mcvae-k11", "cmcd-k11"),
)
"""The VAE, then budgets S (K + 1) of 6 and of 12 decoder passes per image."""
ENCODERS = {"weak": "linear", "strong": None}
"""`--model.encoder` of each: one linear layer, or as many layers as the decoder has."""
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"data": (DataConfig("digits", batch_size=50),), "epochs": (20,), "seeds": 2, "limit": 300},
    "paper": {
        "data": tuple(DataConfig(name, validation=500, batch_size=50) for name in ("mnist", "fashion-mnist")),
        "epochs": (30,),
        "seeds": 3,
        "limit": 1000,
    },
}
"""As in `image_tables`. All use fully connected networks, so that the budget is what differs."""


def cells(options: ReproductionOptions) -> list[Cell]:
    """A cell per data set, encoder, method and seed."""
    preset = PRESETS[options.preset]
    return [
        cell
        for data in preset["data"]
        for strength, encoder in ENCODERS.items()
        for cell in training_cells(
            f"frontier-{data.name}-{strength}",
            TrainConfig(data, ModelConfig("mlp", encoder=encoder)),
            options.methods or METHODS,
            preset,
            options,
            simulated=SIMULATED["mnist"] if options.certified else 32,
            subject=f"{data.name}, {strength} encoder",
        )
    ]
