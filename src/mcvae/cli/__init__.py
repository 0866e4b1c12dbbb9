"""The command line: a file per command. torch is imported when a command runs, not before."""

import signal
import sys
from typing import Any

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug, interrupted = "--debug" in arguments, False

    def interrupt(*_: Any) -> None:
        nonlocal interrupted
        interrupted = True  # a library that is being imported may turn the exception into another
        raise KeyboardInterrupt

    name = "mcvae"
    try:
        before = signal.signal(signal.SIGINT, interrupt)
    except ValueError:  # not the main thread
        before = None
    try:
        from mcvae.cli.parser import parse

        name, command, options = parse([argument for argument in arguments if argument != "--debug"])
        command(options)
    except KeyboardInterrupt:
        interrupted = True
    except SystemExit as end:
        if not interrupted or end.code == 130:  # which has said how to continue
            raise
    except ModuleNotFoundError:  # `mcvae.__main__` names the extra that brings it
        raise
    except Exception as error:
        if debug and not interrupted:
            raise
        if not interrupted:
            from mcvae.cli.mistakes import sentence

            print(f"{name}: {sentence(error)}", file=sys.stderr)
            return 1
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
    if interrupted:
        resumes = name.rpartition(" ")[2] in ("evaluate", "demo", "reproduce", "sweep")
        print("\nInterrupted." + " The same command resumes where it left off." * resumes, file=sys.stderr)
        return 130
    return 0
