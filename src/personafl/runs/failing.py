"""What is made of an error in a run: a failure with its round and a reason in one line."""

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from personafl.errors import Diverged, Interrupted, PersonaError, StorageFailed
from personafl.storage.failure import Failure

_SHORT = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)


def failure_of(error: BaseException, when: str) -> Failure:
    """Return what an error says; the traceback is for the user's own code, which may have raised anything."""
    diverged = isinstance(error, Diverged)
    if isinstance(error, PersonaError) and "\n" not in str(error):
        reason = re.sub(r"^(after )?round \d+: ", "", str(error))
        return Failure(diverged=diverged, when=when, reason=reason)
    trace = "".join(traceback.format_exception(error))
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()] or ["no reason given"]
    text = f"{type(error).__name__}: {lines[0]}"
    if isinstance(error, PersonaError):  # a worker's: who was trained, and the worker's own traceback
        text = f"{lines[0].partition('Traceback')[0]}{_raised(str(error)) or lines[-1]}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or _SHORT.search(text):
        text += "; memory is short: lower engine.memory_mb, engine.workers or training.batch"
    return Failure(diverged=False, when=when, reason=text, traceback=trace)


def _raised(trace: str) -> str:
    """Return the first line of what the last traceback in a text raised: frames are indented, and what follows is not.

    A message may have several lines, of which the last says least.
    """
    _, mark, last = trace.rpartition("Traceback (most recent call last):\n")
    return next((line for line in last.splitlines() if mark and line[:1].strip()), "")


@contextlib.contextmanager
def attempt(run: Path, when: str) -> Iterator[None]:
    """Keep why what is done inside fails; a stop and a disk that is full are no failures of the run's."""
    try:
        yield
    except (Interrupted, StorageFailed):
        raise
    except (Exception, SystemExit) as error:  # a network's forward() may even exit
        failure = failure_of(error, when)
        failure.keep(run)
        raise failure.error(run) from error
