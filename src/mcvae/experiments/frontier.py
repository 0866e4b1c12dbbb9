"""Where do chains pay? One budget of decoder passes per image, spent as samples, as steps, or as both."""

from dataclasses import asdict, replace
from typing import Any

from mcvae.experiments.cells import Cell
from mcvae.experiments.image_tables import CERTIFYING, SIMULATED, __name__ as _images, protocol_settings
from mcvae.experiments.paper import ReproductionOptions
from mcvae.runs.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from mcvae.runs.method import parse_key

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
    epochs = options.epochs or list(preset["epochs"])
    optimizer, evaluation = protocol_settings(options.protocol)
    evaluation |= {"limit": options.limit or preset["limit"], "simulated": 32}
    if options.preset == "paper" and options.protocol == "clean":
        evaluation |= CERTIFYING | {"simulated": SIMULATED["mnist"]}
    found = []
    for data in preset["data"]:
        data = replace(data, limit=options.images)
        for strength, encoder in ENCODERS.items():
            for method in options.methods or METHODS:
                for seed in range(options.seeds or preset["seeds"]):
                    config = TrainConfig(
                        data,
                        ModelConfig("mlp", encoder=encoder),
                        parse_key(method),
                        optimizer,
                        RunConfig(epochs[-1], seed, snapshots=epochs[:-1]),
                    )
                    settings = {
                        "config": asdict(config),
                        "evaluation": evaluation,
                        "method": method,
                        "protocol": options.protocol,
                        "subject": f"{data.name}, {strength} encoder",
                    }
                    name = f"frontier-{data.name}-{strength}-{method}-s{seed}"
                    found.append(Cell(name, f"{_images}:run", settings, ("evaluation",)))
    return found
