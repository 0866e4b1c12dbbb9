"""The command line: a file per command. torch is imported when a command runs, not before."""

import os
import signal
import sys

from mcvae.runs.interruption import Interruption

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug, interruption = "--debug" in arguments, Interruption()
    # Before torch starts its threads, which would otherwise spin while they wait and keep cores from other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    name = "mcvae"
    try:
        before = signal.signal(signal.SIGINT, interruption)
    except ValueError:  # not the main thread
        before = None
    try:
        from mcvae.cli.parser import parse

        arguments = _limit_threads(arguments) or ["--help"]
        name, command, options = parse([argument for argument in arguments if argument != "--debug"])
        interruption.check()
        command(options)
    except KeyboardInterrupt:
        interruption.seen = True
    except SystemExit as end:
        if not interruption.seen or end.code == 130:  # training has already said how to continue
            raise
    except BrokenPipeError:  # the reader, such as `head`, has closed the output
        return 1
    except ModuleNotFoundError:  # `mcvae.__main__` names the missing extra
        raise
    except Exception as error:
        if not interruption.seen:
            if debug:
                raise
            from mcvae.cli.mistakes import sentence

            print(f"{name}: {sentence(error)}", file=sys.stderr)
            return 1
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
    if interruption.seen:
        resumes = name.rpartition(" ")[2] in ("evaluate", "demo", "reproduce", "sweep")
        print("\nInterrupted." + " The same command resumes where it left off." * resumes, file=sys.stderr)
        return 130
    return 0


def _limit_threads(arguments: list[str]) -> list[str]:
    """Obey `--threads N`, which every command has, and return the other arguments."""
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option != "--threads":
            continue
        rest = arguments[:place] + arguments[place + 1 :]
        if not equals:
            value = rest.pop(place) if place < len(rest) else ""
        if not value.isdigit() or int(value) < 1:
            raise ValueError(f"--threads must be a number of at least 1, got {value!r}.")
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = value  # torch reads them when it is imported
        return rest
    return arguments
