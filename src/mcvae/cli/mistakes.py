"""What a person is told when a command fails: one sentence, and where to report what is our mistake."""

import traceback
from pathlib import Path

__all__ = ["sentence"]

_MEANT = {"DataError", "RunError", "SweepError", "DivergedError", "MisconfigurationException", "MissingExtraError"}
"""Errors that were written for a person, besides ValueError and OSError."""


def sentence(error: Exception) -> str:
    """The error as a person should read it.

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
        return "the settings refer to themselves. Write them out."
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if text and (kinds & _MEANT or isinstance(error, ValueError | OSError)):
        return text if text.endswith((".", "?", "!")) else f"{text}."
    frame = traceback.extract_tb(error.__traceback__)[-1]
    reason = " ".join(text.split())[:300]
    return (
        f"a mistake of mcvae, or of a library it uses: {type(error).__name__}: {reason} ({Path(frame.filename).name}, "
        f"line {frame.lineno}). Call it again with --debug for the whole story, and please report it."
    )
