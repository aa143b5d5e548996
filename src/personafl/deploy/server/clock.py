"""The clock of a process that waits for others: it stands still while the process does.

A process may be stopped by a signal, or its machine be too busy for it. Nobody could be heard meanwhile, so that nobody
is late for that.
"""

import time

_LOOK = 0.5  # seconds between two looks at most, if the process is there
_LONG = 10.0  # seconds after which others may have given up, and need time to come back


class Clock:
    """Counts the seconds in which this process was there; it has to be looked at all the time."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._missed = 0.0

    def look(self) -> tuple[float, bool]:
        """Return the time, and whether this process was away for long since the last look."""
        real = time.monotonic()
        away = max(0.0, real - self._looked - _LOOK)
        self._looked = real
        self._missed += away
        return real - self._missed, away > _LONG
