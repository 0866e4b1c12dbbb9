"""mcvae evaluate."""

import sys
from dataclasses import dataclass, field, fields
from functools import partial

from mcvae.cli.notices import tell
from mcvae.report.comparison import certificate, show
from mcvae.runs.config import EvaluationSettings
from mcvae.runs.discovery import find

__all__ = ["Options", "run"]


@dataclass(kw_only=True)
class Options(EvaluationSettings):
    """What to evaluate, and how.

    Args:
        shard: 2/8 evaluates the batches 2, 10, 18, ... and leaves them in the run folder, so that eight machines can
            share the work as 0/8 to 7/8. A last call without it merges them.
    """

    folders: list[str] = field(metadata={"positional": "run folders, or folders of them"})
    shard: str = "0/1"


def run(options: Options) -> None:
    """Measure likelihood (AIS with HMC: pilot, freeze, run) and bound of trained runs on held-out data.

    An interrupted evaluation resumes where it left off when it is called again.
    """
    settings = EvaluationSettings(**{each.name: getattr(options, each.name) for each in fields(EvaluationSettings)})
    settings.check()
    shard = _fraction(options.shard)
    found = tell(find(options.folders), unfinished=settings.epoch is None)
    runs = [run for run in found if run.state == "trained" or settings.epoch is not None]
    from rich.console import Console
    from rich.progress import track

    from mcvae.allocator import keep_memory
    from mcvae.training.evaluate_run import WHOLE, evaluate_run

    keep_memory()

    for each in runs:
        shown = Console(stderr=True)
        wrap = partial(track, description=each.place, disable=not sys.stderr.isatty(), console=shown)
        summary = evaluate_run(each.place, settings, shard=shard, progress=wrap)
        if shard == WHOLE:
            print(certificate(each.place, summary))
        else:
            print(f"{each.place}: shard {options.shard} is done. When all are, leave out --shard to merge them.")
    if settings.epoch is None and shard == WHOLE:
        show(find(options.folders).runs)


def _fraction(text: str) -> tuple[int, int]:
    """Parse a shard such as 2/8."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise ValueError(f"--shard must be one of 0/N, 1/N, ... up to N - 1, got {text!r}.")
    return int(part), int(parts)
