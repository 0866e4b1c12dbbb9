"""A Ctrl-C that nobody can swallow."""

from typing import Any

__all__ = ["Interruption"]


class Interruption:
    """A handler of SIGINT that remembers it.

    Libraries that are being imported may drop the exception, or turn it into another.

    >>> interruption = Interruption()
    >>> try:
    ...     interruption()
    ... except KeyboardInterrupt:
    ...     pass
    >>> interruption.seen
    True
    """

    seen = False
    """Whether there was one."""

    def __call__(self, *_: Any) -> None:
        """Remember, and raise."""
        self.seen = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise again what was dropped."""
        if self.seen:
            raise KeyboardInterrupt
