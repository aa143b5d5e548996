"""Bounds of what a recipe may take on a device, in time and in memory, kept while it is at work."""

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from personafl.errors import BadInput, Failed

T = TypeVar("T")
_STATUS = Path("/proc/self/status")
# How an allocation that failed is called by Python and numpy, by torch, and by the kernels that torch uses.
_NO_MEMORY = ("allocat", "not enough memory", "out of memory", "could not create a")


class _TimeUp(BaseException):
    """Raised in the thread whose time is up; no handler of errors may take it for one."""


class _Alarm:
    """Ends what a thread does by an exception, wherever in Python that thread is then."""

    def __init__(self, seconds: float) -> None:
        self._thread, self._lock, self._over = threading.get_ident(), threading.Lock(), False
        self.rang = False
        self._timer = threading.Timer(seconds, self._ring)
        self._timer.daemon = True

    def start(self) -> None:
        """Let the time run; it may be up before this returns."""
        self._timer.start()

    def _ring(self) -> None:
        with self._lock:
            if not self._over:
                self.rang = True
                _raise_in(self._thread, _TimeUp)

    def stop(self) -> None:
        """End it: from then on nothing is raised."""
        with self._lock:
            self._over = True
            self._timer.cancel()
            _raise_in(self._thread, None)  # what is on its way


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    raised = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


def within_seconds(seconds: float | None, work: Callable[[], T], said: str) -> T:
    """Return what work in this thread returns, or fail with `said` as soon as it has taken longer."""
    if seconds is None:
        return work()
    alarm = _Alarm(seconds)
    try:
        try:
            alarm.start()
            result = work()
        finally:
            alarm.stop()
    except BaseException as error:
        if alarm.rang:
            raise Failed(said) from error
        raise
    if alarm.rang:
        raise Failed(said)
    return result


def data_bytes() -> int:
    """Return how much memory of its own this process has: what `within_bytes` bounds."""
    if sys.platform != "linux":
        raise BadInput("most_memory_mb: can be kept to on Linux alone; remove it from the policy")
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024


def within_bytes(most: int | None, work: Callable[[], T], said: str) -> T:
    """Return what work returns, or fail with `said` if the process needs more memory than `most` for it.

    The system gives it no more meanwhile: an allocation fails at once, before the machine has none left.
    """
    with _bounded(most):
        try:
            return work()
        except Exception as error:
            if _lacks_memory(error):
                raise Failed(said) from error
            raise


@contextlib.contextmanager
def _bounded(most: int | None) -> Iterator[None]:
    if most is None:
        yield
        return
    import resource  # here, for a device without such a bound does not need it

    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _lacks_memory(error: BaseException | None) -> bool:
    """Say whether an allocation failed; what builds networks says so of what it caught."""
    if error is None:
        return False
    told = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _NO_MEMORY)
    return isinstance(error, MemoryError) or told or _lacks_memory(error.__cause__)
