"""Check names and numbers that a user may have mistyped."""

import difflib
from collections.abc import Iterable

__all__ = ["check_name", "check_range"]

_MOST_SHOWN = 35
"""Most names that an error lists: nobody reads more."""


def check_name(what: str, name: str, known: Iterable[str]) -> None:
    """Raise a ValueError, with a guess, if a name is not among those known.

    >>> check_name("likelihood", "bernouli", ["bernoulli", "gaussian"])
    Traceback (most recent call last):
    ValueError: unknown likelihood 'bernouli'; known: bernoulli, gaussian. Did you mean 'bernoulli'?
    """
    names = list(known)
    if name not in names:
        close = difflib.get_close_matches(str(name).lower(), names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        shown = names if len(names) <= _MOST_SHOWN else [*names[:_MOST_SHOWN], f"and {len(names) - _MOST_SHOWN} more"]
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(shown)}.{hint}")


def check_range(name: str, value: float | None, least: float, most: float | None = None, why: str = "") -> None:
    """Raise a ValueError that names the option, for a number that is too small or too large.

    >>> check_range("seeds", 0, 1)
    Traceback (most recent call last):
    ValueError: --seeds must be at least 1, got 0.
    """
    if value is not None and not value >= least:
        raise ValueError(f"--{name} must be at least {least:g}, got {value}{why}.")
    if value is not None and most is not None and not value <= most:
        raise ValueError(f"--{name} must be at most {most:,.0f}, got {value}.")
