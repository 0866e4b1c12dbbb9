"""`mcvae` and `python -m mcvae`: the command line, or one sentence that names the extra it needs."""

import os
import sys

from mcvae._extras import MissingExtraError, needs_extra

__all__ = ["main"]


def main() -> int:
    """Run the command line; return its exit code."""
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    try:
        with needs_extra(f"mcvae {command}" if command else "mcvae"):
            from mcvae.cli import main as run

            return run()
    except MissingExtraError as error:
        if "--debug" in sys.argv:
            raise
        print(error, file=sys.stderr)
        return 1
    finally:
        _flush()


def _flush() -> None:
    """Write the rest of the output. If Python did so on exit, it would print an error about a closed pipe."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"mcvae: the output cannot be written: {error.strerror}.", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    sys.exit(main())
