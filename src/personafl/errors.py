"""The errors a user can act on. Each message is one line: what is wrong, where, and what to do."""

import difflib
from collections.abc import Iterable


class PersonaError(Exception):
    """Base of all errors that personafl raises on purpose; `exit_code` is what the command line returns."""

    exit_code = 1


class BadInput(PersonaError):
    """The recipe, the data or the command line is wrong. Nothing was written."""

    exit_code = 2


class Failed(PersonaError):
    """A run came to no result after it began. What it had saved is kept, and so are the results of others."""

    exit_code = 3


class Diverged(Failed):
    """Training produced a non-finite number. The last good checkpoint is kept."""


class Busy(BadInput):
    """Another process is at work on the run."""


class Interrupted(PersonaError):
    """The user stopped the run. Whole rounds are saved."""

    exit_code = 130


class StorageFailed(PersonaError):
    """The run directory could not be written. What was committed before is intact."""

    exit_code = 2


def printable(text: str) -> str:
    """Return text from elsewhere as one line: what could move a terminal's cursor, or end a line, is written out."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def did_you_mean(wrong: str, valid: Iterable[str]) -> str:
    """Return a remedy that names the nearest valid choices, or all of them when none is near."""
    choices = sorted(valid)
    near = difflib.get_close_matches(wrong, choices, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(repr(name) for name in near)}?"
    return f"valid: {', '.join(choices)}"
