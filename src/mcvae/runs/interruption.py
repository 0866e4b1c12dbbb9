"""A handler of Ctrl-C that works even if a library drops the exception."""

from typing import Any

__all__ = ["Interruption"]


class Interruption:
    """A handler of SIGINT that remembers the signal.

    A library that is being imported may drop the exception, or raise another one instead.

    >>> interruption = Interruption()
    >>> try:
    ...     interruption()
    ... except KeyboardInterrupt:
    ...     pass
    >>> interruption.seen
    True
    """

    seen = False
    """Whether the signal has come."""

    def __call__(self, *_: Any) -> None:
        """Remember the signal, and raise KeyboardInterrupt."""
        self.seen = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt again if the signal has come."""
        if self.seen:
            raise KeyboardInterrupt
