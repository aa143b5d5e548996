"""The processes that do trials, as the one that drives them sees them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from personafl.recipe.recipe import Recipe
from personafl.runs.interrupt import Stop
from personafl.simulate.workers.local import ending
from personafl.sweep.study import Trial
from personafl.sweep.worker import Done, Score, Task, serve

_POLL = 0.2  # seconds between two looks at whether the user wants to stop


@dataclass
class Worker:
    """A process, the pipe to it, and the trial that it is at."""

    process: BaseProcess
    pipe: Connection
    jobs: int  # processes like this one
    trial: Trial | None = None

    @classmethod
    def start(cls, jobs: int) -> Worker:
        """Start a process, one of so many."""
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there, jobs))  # no daemon: its runs may have workers
        process.start()
        there.close()
        return cls(process, here, jobs)

    def begin(self, trial: Trial, task: Task) -> None:
        """Send a trial, to a new process if this one died."""
        if not self.process.is_alive():
            fresh = Worker.start(self.jobs)
            self.process, self.pipe = fresh.process, fresh.pipe
        self.trial = trial
        self.send(task)

    def send(self, message: Any) -> None:
        """Tell it something."""
        with contextlib.suppress(OSError):  # it died; `receive` says so
            self.pipe.send(message)

    def receive(self) -> Score | Done:
        """Return what it says; if it died, that."""
        try:
            message: Score | Done = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            short = "; memory may be short: try fewer --jobs" if self.process.exitcode == -signal.SIGKILL else ""
            return Done(note=f"its process {ending(self.process.exitcode)}{short}")
        return message


@contextlib.contextmanager
def workers(count: int) -> Iterator[list[Worker]]:
    """Start workers, and end them afterwards."""
    found: list[Worker] = []
    try:
        found.extend(Worker.start(count) for _ in range(count))
        yield found
    finally:
        for worker in found:
            worker.process.kill()  # what they wrote survives that
            worker.process.join()


def driven(
    workers: list[Worker], waiting: Iterator[Trial], task: Callable[[Trial], Task], stop: Stop
) -> Iterator[tuple[Worker, Trial, Score | Done]]:
    """Keep workers busy until no trial is waiting, or the user wants to stop; yield what they say of their trials."""
    asked = False
    while True:
        for worker in workers:
            if worker.trial is None and not stop.requested and (trial := next(waiting, None)) is not None:
                worker.begin(trial, task(trial))
        busy = [worker for worker in workers if worker.trial is not None]
        if not busy:
            return
        if stop.requested and not asked:
            asked = True
            for worker in busy:
                worker.process.terminate()  # politely: it finishes its round
        ready = wait([worker.pipe for worker in busy], timeout=_POLL)
        for worker in (worker for worker in busy if worker.pipe in ready):
            trial, message = worker.trial, worker.receive()
            assert trial is not None
            if isinstance(message, Done):
                worker.trial = None
            yield worker, trial, message


def cores(recipe: Recipe) -> int:
    """Return how many cores this process may use; on a GPU, which trials would fight for, 1."""
    if recipe.engine.device != "cpu" and torch.cuda.is_available():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
