"""Tasks done here or by worker processes, one thread each: the same bits, in the same order.

Workers are forks of the process that runs the simulation: data, networks and rules are there already, also those that
cannot be pickled, and take no memory of their own. Tensors come and go through memory that both sides map. A worker
that is left alone is ended by the kernel, so none outlives its parent, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import itertools
import math
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from personafl.errors import BadInput, PersonaError
from personafl.storage.store import States, Store

Count = int | Literal["auto"]
Work = Callable[[Any], Any]

_LONG = 0.1  # seconds of tasks, of a round or a scoring, from which on workers are worth their messages
_ROOM = 2**28  # bytes that a message's tensors may take in shared memory; what is beyond goes through the pipe
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


class WorkerFailed(PersonaError):
    """A worker process died, or what it ran raised an error. `task` says which of the tasks it was."""

    def __init__(self, message: str, task: int) -> None:
        super().__init__(message)
        self.task = task


_SHARING: ContextVar[int] = ContextVar("sharing", default=1)


def cores() -> int:
    """Return how many workers are good for a run: its share of the cores; 1 where processes cannot be forked safely."""
    if sys.platform != "linux" or torch.cuda.is_available():  # autograd's threads for a GPU do not survive a fork
        return 1
    if multiprocessing.current_process().daemon:  # Python lets it have no children
        return 1
    return max(1, len(os.sched_getaffinity(0)) // _SHARING.get())


def share_cores(runs: int) -> None:
    """Say that so many runs, each in a process such as this one, have the machine's cores together."""
    _SHARING.set(runs)


def end_with_parent() -> None:
    """End this process, started by `multiprocessing`, when the one that started it is gone, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def ending(code: int | None) -> str:
    """Say how a process ended, by its exit code."""
    return f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"


class Workers(Protocol):
    """Who does tasks, wherever that is."""

    def stored(self, store: Store, clients: int) -> States:
        """Return the store of a simulation of so many clients, with the states that stay where these work."""

    def map(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield the result of each task, in the tasks' order."""

    def close(self) -> None:
        """End what was started for it, with the states that are there; a later task starts it again."""


class LocalWorkers:
    """Does tasks in order: in this process, or by workers. `count` "auto": one per core, once there is enough to do.

    With more than one worker, or "auto", a task has one thread wherever it is done, so it makes no difference where.
    """

    def __init__(self, work: Work, count: Count) -> None:
        if count not in (1, "auto") and multiprocessing.current_process().daemon:
            raise BadInput(
                f"engine.workers: {count} cannot be started from a daemonic process, to which Python allows none; "
                'use engine.workers = 1 or "auto", or start this process with daemon=False'
            )
        self._work = work
        self._single = count != 1
        self._count = cores() if count == "auto" else count
        self._worth = count != "auto"
        self._pool: _Pool | None = None

    def stored(self, store: Store, clients: int) -> Store:
        """Return the store itself: states come with the tasks, and new ones with the results."""
        return store

    def map(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield the result of each task, in the tasks' order."""
        left = enumerate(tasks)
        if self._count == 1 or not self._worth:
            yield from self._here(left)
        first = next(left, None)
        if first is None:
            return
        if self._pool is None:
            self._pool = _Pool(self._work, self._count)
        try:
            yield from self._pool.map(itertools.chain([first], left))
        except BaseException:
            self.close()  # workers may still be at something that nobody waits for
            raise

    def _here(self, tasks: Iterator[tuple[int, Any]]) -> Iterator[Any]:
        """Do tasks in this process: all of them, or until workers are worth it."""
        spent = 0.0
        for _, task in tasks:
            began = time.perf_counter()
            with one_thread() if self._single else contextlib.nullcontext():
                result = self._work(task)
            spent += time.perf_counter() - began
            yield result
            if self._count > 1 and spent > _LONG:
                self._worth = True
                return

    def close(self) -> None:
        """End the workers; a later task starts others."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


MakeWorkers = Callable[[Work, Count], Workers]
_MAKE: ContextVar[MakeWorkers] = ContextVar("make_workers", default=LocalWorkers)


def workers_for(work: Work, count: Count) -> Workers:
    """Return who does tasks: workers of this machine, unless `done_by` says otherwise."""
    return _MAKE.get()(work, count)


def on_other_machines() -> bool:
    """Say whether others than this machine do the tasks."""
    return _MAKE.get() is not LocalWorkers


@contextlib.contextmanager
def done_by(make: MakeWorkers) -> Iterator[None]:
    """Have the tasks of simulations that are made in this context done by others."""
    before = _MAKE.set(make)
    try:
        yield
    finally:
        _MAKE.reset(before)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Pool:
    """Running workers."""

    def __init__(self, work: Work, count: int) -> None:
        self._workers = [_Worker(work) for _ in range(count)]
        self.close = weakref.finalize(self, _end, self._workers)

    def map(self, ahead: Iterator[tuple[int, Any]]) -> Iterator[Any]:
        """Give numbered tasks to whoever is idle, and yield results in order; few wait for an earlier one."""
        idle, busy = list(self._workers), dict[Connection, tuple[int, _Worker]]()
        waiting, done, more = deque[int](), dict[int, Any](), True
        while True:
            while more and idle and len(done) < 2 * len(self._workers):
                number, task = next(ahead, (-1, None))
                more = number >= 0
                if more:
                    worker = idle.pop()
                    worker.send(task, number)
                    busy[worker.connection] = number, worker
                    waiting.append(number)
            while waiting and waiting[0] in done:
                yield done.pop(waiting.popleft())
            if not busy:
                if not more:
                    return
                continue
            ends = {worker.process.sentinel: connection for connection, (_, worker) in busy.items()}
            for ready in wait([*busy, *ends]):
                connection = ready if isinstance(ready, Connection) else ends[ready]  # type: ignore[index]
                if connection in busy:
                    number, worker = busy.pop(connection)
                    done[number] = worker.receive(number)
                    idle.append(worker)


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()  # it ignores what is more polite
        worker.process.join()
        worker.process.close()
        worker.connection.close()


class _Again(NamedTuple):
    """In place of a task's broadcast: that of the worker's last task."""


class _Worker:
    """One process, and how it is talked to."""

    def __init__(self, work: Work) -> None:
        self._down: Any = None
        self.connection, other = multiprocessing.Pipe()
        self._tasks, self._results = _Shelf(), _Shelf()
        arguments = (other, self._tasks, self._results, work, os.getpid())
        self.process = multiprocessing.get_context("fork").Process(target=_serve, args=arguments, daemon=True)
        with warnings.catch_warnings():
            # Python warns of forks beside threads; a worker uses none of what those may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        other.close()

    def send(self, task: Any, number: int) -> None:
        """Give it a task; the broadcast of its last one is not sent again."""
        down = getattr(task, "down", None)
        if down is not None and down is self._down:
            task = task._replace(down=_Again())
        self._down = down
        try:
            self.connection.send_bytes(self._tasks.dumps(task))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died(number) from error

    def receive(self, number: int) -> Any:
        """Return the task's result; raise what went wrong."""
        try:
            good, result = self._results.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError) as error:
            raise self._died(number) from error
        if good:
            return result
        if isinstance(result, PersonaError):
            raise result
        raise WorkerFailed(str(result), number)

    def _died(self, number: int) -> WorkerFailed:
        self.process.join(1)
        short = "; memory may be short: lower engine.memory_mb or engine.workers"
        killed = self.process.exitcode == -signal.SIGKILL
        return WorkerFailed(f"a worker process {ending(self.process.exitcode)}{short if killed else ''}", number)


def _serve(connection: Connection, tasks: _Shelf, results: _Shelf, work: Work, parent: int) -> None:
    """Do tasks until the parent is gone."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that was asked for
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group, they are for the parent to answer
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # some sandboxes forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # who wakes does not push aside the one who woke it
    torch.set_num_threads(1)
    down: Any = None
    while True:
        task = tasks.loads(connection.recv_bytes())
        if isinstance(getattr(task, "down", None), _Again):
            task = task._replace(down=down)
        down = getattr(task, "down", None)
        try:
            answer = results.dumps((True, work(task)))
        except PersonaError as error:
            answer = results.dumps((False, error))
        except (Exception, SystemExit):
            answer = results.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)


class _Shelf:
    """Memory that two processes map, for the tensors of one message at a time."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _ROOM)  # taken from the machine as it is written to

    def dumps(self, message: Any) -> bytes:
        """Return a message as bytes, with its tensors put here; they keep their order in memory."""
        file = io.BytesIO()
        _Putting(file, self.view).dump(message)
        return file.getvalue()

    def loads(self, data: bytes) -> Any:
        """Return the message, with tensors of its own."""
        return _Taking(io.BytesIO(data), self.view).load()

    def view(self, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], start: int) -> Tensor:
        """Return what lies here as a tensor, or room for one."""
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)
        return flat.as_strided(shape, stride)


class _Putting(pickle.Pickler):
    """A pickler that puts tensors on a shelf while there is room; the rest of them, and all else, it pickles."""

    def __init__(self, file: io.BytesIO, view: Callable[..., Tensor]) -> None:
        super().__init__(file, protocol=5)
        self._view, self._used = view, 0

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or self._used + obj.nbytes > _ROOM:
            return None
        place = obj.dtype, tuple(obj.shape), torch.empty_like(obj, device="meta").stride(), self._used
        self._view(*place).copy_(obj)
        self._used += -(-obj.nbytes // 64) * 64
        return place


class _Taking(pickle.Unpickler):
    """An unpickler that copies tensors from the shelf."""

    def __init__(self, file: io.BytesIO, view: Callable[..., Tensor]) -> None:
        super().__init__(file)
        self._view = view

    def persistent_load(self, pid: Any) -> Tensor:
        return self._view(*pid).clone()
