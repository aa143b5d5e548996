"""Stopping politely: the first Ctrl-C (or SIGTERM) lets the round finish and be saved, the second one stops at once."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Stop:
    """Whether a stop was asked for."""

    def __init__(self) -> None:
        self.requested = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextlib.contextmanager
def polite_stop() -> Iterator[Stop]:
    """Catch signals while a run is on. Outside the main thread there are none to catch."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
