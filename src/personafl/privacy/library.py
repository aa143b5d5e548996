"""dp-accounting, which does all accounting here; loaded at first use, for it is an extra."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from personafl.errors import BadInput


def library() -> Any:
    """Return the package dp_accounting."""
    try:
        import dp_accounting
    except ImportError:
        raise BadInput("privacy: dp-accounting is not installed; run: pip install 'personafl[privacy]'") from None
    return dp_accounting


@contextmanager
def unheard() -> Iterator[None]:
    """Keep it from logging the Rényi orders that it leaves out: without them epsilon is larger, which is safe."""
    log = logging.getLogger("absl")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was
