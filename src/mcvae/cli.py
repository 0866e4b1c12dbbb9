"""The command line. Every command is a typed function; torch is imported when one runs, not before."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from mcvae.training.config import (
    DataConfig,
    MethodConfig,
    ModelConfig,
    OptimizerConfig,
    Option,
    RunConfig,
    TrainConfig,
)

__all__ = ["main"]


def train(
    data: DataConfig = DataConfig(),  # noqa: B008 (jsonargparse reads defaults from signatures)
    model: ModelConfig = ModelConfig(),  # noqa: B008
    method: MethodConfig = MethodConfig(),  # noqa: B008
    optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008
    run: RunConfig = RunConfig(),  # noqa: B008
    trainer: dict[str, Option] | None = None,
    resume: str | None = None,
) -> None:
    """Train a model: mcvae train --data mnist --method l-mcvae.

    Args:
        data: the images.
        model: networks and likelihood.
        method: the bound to train on.
        optimizer: the optimiser.
        run: length, seed, folder.
        trainer: options of Lightning's Trainer, such as --trainer.devices 2 --trainer.strategy ddp.
        resume: run folder to continue; its config.yaml decides everything else.
    """
    config = TrainConfig(data, model, method, optimizer, run, trainer or {})
    if resume is not None and config != TrainConfig():
        raise ValueError(f"--resume goes on with the settings of {resume}/config.yaml; leave out all other options.")
    from mcvae.training.run import train as fit

    fit(config, resume=resume)


def evaluate_runs(
    folders: list[str],
    split: Literal["test", "validation"] = "test",
    protocol: Literal["serious", "paper"] = "serious",
    num_steps: int | Literal["auto"] | None = None,
    num_samples: int | None = None,
    start: Literal["encoder", "prior"] | None = None,
    spacing: Literal["adaptive", "sigmoid", "linear"] | None = None,
    tolerance: float | None = None,
    max_steps: int | None = None,
    limit: int | None = None,
    simulated: int = 32,
    compare_iwae: bool = True,
    tuning: str | None = None,
    memory: str = "1GB",
    device: str = "cpu",
    seed: int | None = None,
    epoch: int | None = None,
    processes: int = 1,
    shard: str = "0/1",
) -> None:
    """Measure likelihood (AIS with HMC: pilot, freeze, run) and bound of trained runs on held-out images.

    An interrupted evaluation goes on where it was when it is called again.

    Args:
        folders: run folders.
        split: test or validation.
        protocol: serious, or the paper's (5 temperatures, 10 chains); what follows replaces parts of it.
        num_steps: temperatures of AIS-HMC; auto doubles them until the estimate settles.
        num_samples: chains of AIS-HMC per image.
        start: where chains start, q(z|x) or p(z).
        spacing: of the temperatures.
        tolerance: in nats, for auto and for verdicts.
        max_steps: most temperatures that auto may take.
        limit: evaluate only so many images, evenly spaced in the split.
        simulated: images to simulate from the model for bounds from both sides; 0 for none.
        compare_iwae: also estimate by importance sampling at equal cost, which doubles the time.
        tuning: tuning.json of another evaluation, instead of a pilot.
        memory: for activations, such as 500MB or 4GB.
        device: such as cpu or cuda.
        seed: that of the run if not given.
        epoch: evaluate the weights after this epoch, one of --run.snapshots, instead of the last.
        processes: share the batches among so many processes of this machine; with --device cuda each takes one GPU.
        shard: 2/8 evaluates the batches 2, 10, 18, ... and leaves them in the run folder, so that eight machines can
            share the work as 0/8 to 7/8; without it, afterwards, they are put together.
    """
    from rich.console import Console
    from rich.progress import track

    from mcvae.report.compare import certificate, collect, show
    from mcvae.training.evaluation import evaluate_run

    collect(folders, skip_unfinished=epoch is not None)
    options = {name: value for name, value in locals().items() if name in signature(evaluate_runs).parameters}
    options |= {"memory": _bytes(memory), "shard": _fraction(shard)}
    for folder in options.pop("folders"):
        shown = Console(stderr=True)
        wrap = partial(track, description=folder, disable=not sys.stderr.isatty(), console=shown)
        found = evaluate_run(folder, **options, progress=wrap)
        if shard == "0/1":
            print(certificate(folder, found))
        else:
            print(f"{folder}: shard {shard} is done. When all are, leave out --shard to put them together.")
    if epoch is None:
        show(collect(folders))


def _fraction(text: str) -> tuple[int, int]:
    """2/8 as two numbers."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise ValueError(f"--shard must be one of 0/N, 1/N, ... up to N - 1, got {text!r}.")
    return int(part), int(parts)


def _bytes(text: str) -> float:
    """500MB as a number."""
    units = {"KB": 1e3, "MB": 1e6, "GB": 1e9}
    number, unit = text[:-2], text[-2:].upper()
    try:
        amount = float(number) * units[unit]
    except (KeyError, ValueError):
        amount = 0.0
    if amount <= 0:
        raise ValueError(f"--memory must look like 500MB or 4GB, got {text!r}.")
    return amount


def sample(folder: str, number: int = 64, out: str | None = None, seed: int = 0) -> None:
    """Draw images from a trained run.

    Args:
        folder: run folder.
        number: how many.
        out: PNG to write; FOLDER/pictures/drawn.png if not given.
        seed: of the latents.
    """
    from mcvae.training.callbacks import mean_images
    from mcvae.training.files import load, read_json
    from mcvae.training.pictures import save_grid
    from mcvae.training.storage import RunFolder, check_links, top_level

    if number < 1:
        raise ValueError(f"--number must be at least 1, got {number}.")
    home = RunFolder(folder, top_level)
    check_links(home.path)
    model = load(home.path)
    latent_dim = read_json(home.path / "model.json")["model"]["latent_dim"]
    path = Path(out) if out else home.path / "pictures" / "drawn.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_grid(mean_images(model, number, latent_dim, seed), path)
    home.push()
    print(out or f"{folder}/pictures/drawn.png")


def compare(folders: list[str]) -> None:
    """Show runs in one table, best likelihood first.

    Args:
        folders: run folders.
    """
    from mcvae.report.compare import collect, show

    show(collect(folders, skip_unfinished=True))


def write_report(folders: list[str], out: str = "report.html") -> None:
    """Make one page of runs and reproductions that opens in any browser: mcvae report runs --out report.html.

    Args:
        folders: run folders, reproduction folders, or folders of them.
        out: the HTML file.
    """
    from mcvae.report.page import write_page

    print(write_page(folders, out))


def methods() -> None:
    """List methods and data sets, a line each."""
    from mcvae.data import DATASETS
    from mcvae.training.methods import METHODS

    for title, entries in (("methods", METHODS), ("data sets", DATASETS)):
        print(f"{title}:")
        for name, entry in entries.items():
            print(f"  {name:<14} {entry.description}")


def demo(folder: str = "runs/demo", epochs: int = 60, seed: int = 0) -> None:
    """Train four methods on bundled digits with one budget, evaluate them on test images, and compare.

    Args:
        folder: where the runs go; finished ones are not trained again.
        epochs: for each method.
        seed: for each method.
    """
    from mcvae.report.compare import collect, show
    from mcvae.training.demo import run_demo

    runs = run_demo(folder, epochs, seed)
    show(collect(runs))
    print(f"All of it, with pictures, as a page: mcvae report {folder}")


def reproduce_paper(
    name: str,
    preset: Literal["quick", "paper"] = "quick",
    protocol: Literal["clean", "paper"] = "clean",
    seeds: int | None = None,
    methods: list[str] | None = None,
    epochs: list[int] | None = None,
    limit: int | None = None,
    out: str = "reproduction",
    workers: int = 1,
    retries: int = 1,
    collect: bool = False,
) -> None:
    """Reproduce a table or figure of the paper: mcvae reproduce toy-posterior.

    Finished cells are not run again and interrupted ones go on where they were.

    Args:
        name: toy-posterior, toy-parameters, ppca, mnist, celeba, cifar10, k-sweep, training-curves, or all.
        preset: quick shows the effect within minutes on two cores (digits instead of MNIST); paper is the real thing.
        protocol: clean, or what the paper states (plain Adam, its short likelihood estimator).
        seeds: how many; the preset's choice if not given.
        methods: only these, such as [vae,l-mcvae-linear-k5] (images).
        epochs: after which to evaluate, the last being the length of training, such as [10,30,100] (images).
        limit: test images to evaluate on; the preset's choice if not given (images).
        out: folder of all reproductions.
        workers: processes; cores are shared among them.
        retries: how often a failed cell is tried again.
        collect: run nothing; table and figure of what is there, unfinished training included.
    """
    from mcvae.experiments.reproduce import EXPERIMENTS, Options, reproduce
    from mcvae.report.present import present
    from mcvae.sweep import SweepError

    if name != "all" and name not in EXPERIMENTS:
        raise ValueError(f"unknown experiment {name!r}; known are {', '.join(EXPERIMENTS)}, all.")
    for option, number, least in (("seeds", seeds, 1), ("limit", limit, 2), ("workers", workers, 0)):
        if number is not None and number < least:
            raise ValueError(f"--{option} must be at least {least}, got {number}.")
    options = Options(
        preset, protocol, seeds, tuple(methods) if methods else None, tuple(epochs) if epochs else None, limit
    )
    command = "mcvae " + " ".join(sys.argv[1:])
    failed = []
    for each in EXPERIMENTS if name == "all" else [name]:
        try:
            with live_table(each) as show:
                folder = reproduce(
                    each,
                    options,
                    Path(out),
                    workers=workers,
                    retries=retries,
                    collect=collect,
                    command=command,
                    show=show,
                )
        except SweepError as error:
            if name != "all":
                raise
            failed.append(each)
            print(f"{each}: {error}", file=sys.stderr)
            continue
        for path in present(folder):
            print(path)
    if failed:
        raise SweepError(f"not reproduced: {', '.join(failed)}.")


def sweep_grid(
    data: list[str] = ["digits"],  # noqa: B006 (jsonargparse reads defaults from signatures)
    methods: list[str] = ["vae", "iwae-10", "l-mcvae-k5", "a-mcvae-k3"],  # noqa: B006
    seeds: int = 1,
    settings: dict[str, Any] | None = None,
    vary: dict[str, list[Any]] | None = None,
    evaluation: dict[str, Any] | None = None,
    out: str = "sweep",
    workers: int | None = None,
    threads: int = 1,
    retries: int = 1,
    backend: Literal["local", "ray"] = "local",
    address: str = "auto",
    gpus: float = 0.0,
) -> None:
    """Train and evaluate data sets x methods x settings x seeds, on this machine or a Ray cluster.

    Done cells are not done again, interrupted ones go on, failed ones are reported at the end.

    Args:
        data: data sets.
        methods: such as vae, iwae-10, l-mcvae-sigmoid-k5, a-mcvae-k3-n5, uha-k10, realnvp.
        seeds: how many.
        settings: of every run, by dotted name, such as '{run.epochs: 20, data.batch_size: 50}'.
        vary: lists of values by dotted name, such as '{optimizer.learning_rate: [0.001, 0.0003]}'.
        evaluation: options of mcvae evaluate, such as '{limit: 100, num_steps: 32, num_samples: 16}'.
        out: folder of the cells.
        workers: processes; as many as there are cores if not given.
        threads: of each process.
        retries: how often a failed cell is tried again, from its last checkpoint.
        backend: local processes, or ray, for which out must be a folder that all machines share.
        address: of the Ray cluster; local starts one here.
        gpus: of each cell of a Ray cluster.
    """
    import os

    from mcvae.experiments.grid import grid
    from mcvae.records import write_records
    from mcvae.report.compare import collect, show as show_table
    from mcvae.sweep import Cluster, run_cells

    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}.")
    if threads < 1:
        raise ValueError(f"--threads must be at least 1, got {threads}.")
    cells = grid(data, methods, seeds, settings or {}, vary or {}, evaluation or {})
    with live_table(f"{out}") as show:
        records = run_cells(
            Path(out),
            cells,
            workers=workers or os.cpu_count() or 1,
            threads=threads,
            retries=retries,
            cluster=Cluster(address, gpus) if backend == "ray" else None,
            show=show,
        )
    write_records(Path(out) / "records.csv", records)
    show_table(collect([f"{out}/{cell.name}" for cell in cells]))
    print(f"{out}/records.csv")


@contextmanager
def live_table(title: str) -> Iterator[Callable[[Any], None]]:
    """A function that shows how far cells are: a table on a terminal, else a line whenever something changes."""
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    if not sys.stderr.isatty():
        seen = dict[str, str]()

        def lines(progress: Any) -> None:
            for cell in progress:
                if seen.get(cell.name, "queued") != cell.status:
                    print(f"{cell.name}: {cell.status} {cell.detail}".rstrip(), file=sys.stderr, flush=True)
                seen[cell.name] = cell.status

        yield lines
        return
    with Live(console=Console(stderr=True), refresh_per_second=2, transient=True) as live:

        def rows(progress: Any) -> None:
            done = sum(cell.status == "done" for cell in progress)
            table = Table("cell", "status", "", title=f"{title}: {done} of {len(progress)} done")
            for cell in [c for c in progress if c.status in ("running", "failed")][:30]:
                table.add_row(cell.name, cell.status, cell.detail)
            live.update(table)

        yield rows


COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "evaluate": evaluate_runs,
    "sample": sample,
    "compare": compare,
    "report": write_report,
    "methods": methods,
    "demo": demo,
    "reproduce": reproduce_paper,
    "sweep": sweep_grid,
}
SHORTHANDS = ("--data", "--method")
"""Options whose plain value is a name: --data mnist means --data.name mnist."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if arguments[:1] == ["train"]:
        arguments = _expand(arguments)
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    options = parser.instantiate(parsed)[parsed.command].as_dict()
    options.pop("config", None)
    try:
        COMMANDS[parsed.command](**options)
    except KeyboardInterrupt:
        goes_on = parsed.command in ("evaluate", "demo", "reproduce", "sweep")
        print("\nInterrupted." + " The same command goes on where it was." * goes_on, file=sys.stderr)
        return 130
    except Exception as error:
        if debug or not _is_users_mistake(error):
            raise
        print(f"mcvae {parsed.command}: {error}", file=sys.stderr)
        return 1
    return 0


def build_parser() -> Any:
    """The parser of all commands, with a subparser each."""
    from importlib.metadata import version

    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="mcvae", description="Monte Carlo variational auto-encoders.", version=f"mcvae {version('mcvae')}"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subcommands(required=True, dest="command")
    for name, function in COMMANDS.items():
        summary = (function.__doc__ or "").splitlines()[0]
        command = ArgumentParser(description=summary)
        if function in (train, sweep_grid):
            command.add_argument("--config", action="config", help="YAML file of these options")
        many = "folders" in signature(function).parameters
        if many:
            command.add_argument("folders", nargs="+", type=str, help="run folders, or folders of them")
        command.add_function_arguments(function, as_positional=True, skip={"folders"} if many else set())
        commands.add_subcommand(name, command, help=summary)
    return parser


def _expand(arguments: list[str]) -> list[str]:
    expanded = []
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        following = value or (arguments[index + 1] if index + 1 < len(arguments) else "")
        is_name = name in SHORTHANDS and following and not following.endswith((".yaml", ".yml", ".json", "}"))
        expanded.append(argument.replace(name, f"{name}.name", 1) if is_name else argument)
    return expanded


def _is_users_mistake(error: Exception) -> bool:
    """Errors that are written for a person; anything else is ours and shows its traceback."""
    plain = {"DataError", "RunError", "SweepError", "DivergedError", "MisconfigurationException"}
    return type(error).__name__ in plain or isinstance(error, ValueError | OSError)


if __name__ == "__main__":
    sys.exit(main())
