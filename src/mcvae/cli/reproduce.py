"""mcvae reproduce."""

import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mcvae.cli.progress import live_table
from mcvae.experiments.cells import SweepError
from mcvae.runs.method import parse_key
from mcvae.runs.naming import check_name

__all__ = ["Options", "run"]

NAMES = (
    "toy-posterior",
    "toy-parameters",
    "ppca",
    "mnist",
    "celeba",
    "cifar10",
    "k-sweep",
    "training-curves",
    "posteriors",
)
"""Of `EXPERIMENTS`, which imports torch; a test compares them."""
POSTERIOR_METHODS = ("vi", "ula", "mcd", "cmcd", "uha", "ldvi", "cmcd-ud", "ais-mala", "smc")
"""Of `posteriors.METHODS`, likewise."""


@dataclass(kw_only=True)
class Options:
    """What to reproduce, and how far.

    Args:
        preset: quick shows the effect within minutes on two cores (digits instead of MNIST); paper is the real thing.
        protocol: clean, or what the paper states (plain Adam, its short likelihood estimator).
        seeds: how many; the preset's choice if not given.
        methods: only these, such as [vae,l-mcvae-linear-k5] (images), or [ula,cmcd] (posteriors).
        epochs: after which to evaluate, the last being the length of training, such as [10,30,100] (images).
        limit: test images to evaluate on; the preset's choice if not given (images).
        out: folder of all reproductions.
        workers: processes; cores are shared among them.
        retries: how often a failed cell is tried again.
        collect: run nothing; table and figure of what is there, unfinished training included.
    """

    name: str = field(
        metadata={
            "positional": "toy-posterior, toy-parameters, ppca, mnist, celeba, cifar10, k-sweep, training-curves, "
            "posteriors, all"
        }
    )
    preset: Literal["quick", "paper"] = "quick"
    protocol: Literal["clean", "paper"] = "clean"
    seeds: int | None = None
    methods: list[str] | None = None
    epochs: list[int] | None = None
    limit: int | None = None
    out: str = "reproduction"
    workers: int = 1
    retries: int = 1
    collect: bool = False


def run(options: Options) -> None:
    """Reproduce a table or figure of the paper: mcvae reproduce toy-posterior.

    Finished cells are not run again and interrupted ones resume where they left off.
    """
    check_name("experiment", options.name, [*NAMES, "all"])
    least = {"seeds": 1, "limit": 2, "workers": 0, "retries": 0}
    for name, smallest in least.items():
        value = getattr(options, name)
        if value is not None and value < smallest:
            raise ValueError(f"--{name} must be at least {smallest}, got {value}.")
    for method in options.methods or ():
        if options.name == "posteriors":
            check_name("method", method, POSTERIOR_METHODS)
        else:
            parse_key(method)
    if (epochs := options.epochs) is not None and (not epochs or epochs != sorted(set(epochs)) or epochs[0] < 1):
        raise ValueError(f"--epochs must increase, such as [10,30,100]; got {epochs}.")
    from mcvae.experiments import reproduction
    from mcvae.report.present import present

    chosen = reproduction.Options(
        options.preset,
        options.protocol,
        options.seeds,
        tuple(options.methods) if options.methods else None,
        tuple(options.epochs) if options.epochs else None,
        options.limit,
    )
    failed = []
    for each in NAMES if options.name == "all" else [options.name]:
        try:
            with live_table(each) as show:
                folder = reproduction.reproduce(
                    each,
                    chosen,
                    Path(options.out),
                    workers=options.workers,
                    retries=options.retries,
                    collect=options.collect,
                    command=shlex.join(["mcvae", *sys.argv[1:]]),
                    show=show,
                )
        except SweepError as error:
            if options.name != "all":
                raise
            failed.append(each)
            print(f"{each}: {error}", file=sys.stderr)
            continue
        for path in present(folder):
            print(path)
    if failed:
        raise SweepError(f"not reproduced: {', '.join(failed)}.")
