"""Turn an exception into one sentence for the user."""

import traceback
from pathlib import Path

__all__ = ["sentence"]

_MEANT = {"DataError", "RunError", "SweepError", "DivergedError", "MisconfigurationException", "MissingExtraError"}
"""Errors whose message is meant for users, besides ValueError and OSError."""


def sentence(error: Exception) -> str:
    """The error in one sentence; for a bug, with the place and a request to report it.

    >>> sentence(ValueError("--seeds must be at least 1, got 0."))
    '--seeds must be at least 1, got 0.'
    """
    text = "\n".join(line.rstrip() for line in str(error).strip().splitlines())
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.filename} cannot be used: {error.strerror}."
    if isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text:
        return (
            "there is not enough memory for this. Choose smaller numbers, such as --data.batch_size, "
            "--model.latent_dim, --method.num_steps or, of an evaluation, --memory."
        )
    if isinstance(error, RecursionError):
        return "the settings refer to themselves. Write every value in full."
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if text and (kinds & _MEANT or isinstance(error, ValueError | OSError)):
        return text if text.endswith((".", "?", "!")) else f"{text}."
    frame = traceback.extract_tb(error.__traceback__)[-1]
    reason = " ".join(text.split())[:300]
    return (
        f"a bug in mcvae, or in a library it uses: {type(error).__name__}: {reason} ({Path(frame.filename).name}, "
        f"line {frame.lineno}). Run it again with --debug for the traceback, and please report it."
    )
