"""A run in its directory: what is done, and what of it is saved."""

import dataclasses
import time
from collections.abc import Iterable
from typing import Any, NoReturn

from personafl.core import wire
from personafl.errors import BadInput, Interrupted
from personafl.runs.alarms import Alarm, Alarms
from personafl.runs.job import Job
from personafl.runs.listener import Listener, Note
from personafl.runs.tracking import Tracker
from personafl.simulate.cloud import make_simulation
from personafl.simulate.simulator import Round, Simulation
from personafl.storage.rundir import Checkpoint, RunDirectory, resume_command
from personafl.storage.store import Store


def opened(job: Job, directory: RunDirectory, checkpoint: Checkpoint) -> tuple[Simulation, Store]:
    """Return the simulation as a checkpoint left it, and the fine-tuned states."""
    budget = job.recipe.engine.store_mb * 2**20
    store = Store(directory.path / "states", budget, checkpoint.states)
    server = directory.server_bytes(checkpoint) if checkpoint.rounds or checkpoint.server else None
    try:
        simulation = make_simulation(job.federation, store, server)
    except BadInput as error:
        raise BadInput(f"{directory.path}: the server's state after round {checkpoint.rounds}: {error}") from error
    return simulation, Store(directory.path / "tuned", budget, checkpoint.tuned)


class Run:
    """A job under way: its simulation, its fine-tuned states, and the totals since it began."""

    def __init__(
        self, job: Job, directory: RunDirectory, checkpoint: Checkpoint, tracker: Tracker, listener: Listener | None
    ) -> None:
        self.job, self.directory, self.total, self._saved = job, directory, checkpoint, time.monotonic()
        self._tracker, self._listener = tracker, listener
        split = job.federation.problems[0].split is not None
        self.alarms = Alarms(job.federation.data, split, job.recipe.rounds, directory.metrics())
        self.simulation, self.tuned = opened(job, directory, checkpoint)

    def record(self, entry: dict[str, Any]) -> None:
        """Write a line of metrics, here and where the recipe tracks them."""
        self.directory.record(entry)
        self._tracker.metrics(entry)

    def warn(self, number: int, alarms: Iterable[Alarm]) -> None:
        """Write down what looks wrong after a round, and tell who listens."""
        for kind, text in alarms:
            self.directory.record({"event": "warning", "number": number, "kind": kind, "text": text})
            if self._listener is not None:
                self._listener(Note(f"warning: {text}"))

    def add(self, done: Round | None, seconds: float) -> None:
        """Count a round, or only time."""
        self.total = dataclasses.replace(
            self.total,
            rounds=self.total.rounds if done is None else done.number + 1,
            bytes_down=self.total.bytes_down + (done.bytes_down if done else 0),
            bytes_up=self.total.bytes_up + (done.bytes_up if done else 0),
            seconds=self.total.seconds + seconds,
            time=self.total.time if done is None else done.time,
        )

    def save(self, seconds: float) -> None:
        """Commit a checkpoint if the last one is so many seconds old."""
        if time.monotonic() - self._saved < seconds:
            return
        states, tuned = self.simulation.store.flush(), self.tuned.flush()
        length, crc = self.directory.record(durable=True)
        total = dataclasses.replace(self.total, states=states, tuned=tuned, metrics_bytes=length, metrics=crc)
        self.directory.commit(total, wire.encode(self.simulation.saved()))
        self.simulation.store.collect()
        self.tuned.collect()
        self._saved = time.monotonic()

    def stop(self, when: str) -> NoReturn:
        """Save and stop because the user asked for it."""
        self.save(0)
        raise Interrupted(f"stopped {when}; continue with: {resume_command(self.directory.path)}")
