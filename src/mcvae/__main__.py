"""`mcvae` and `python -m mcvae`: the command line, and one sentence where it is not installed."""

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


if __name__ == "__main__":
    sys.exit(main())
