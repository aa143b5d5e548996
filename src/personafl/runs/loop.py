"""One run from start to result: rounds, fine-tuning, checkpoints. The loop reads top to bottom in `_train`."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from personafl.core import wire
from personafl.data.federated import Clients
from personafl.runs.checkpoints import Run
from personafl.runs.failing import attempt
from personafl.runs.interrupt import polite_stop
from personafl.runs.job import Job
from personafl.runs.listener import Listener, Note, Progress, Tuning
from personafl.runs.private import affordable, charged
from personafl.runs.recording import record_forms, record_scores, score_all
from personafl.runs.result import Result, make_result
from personafl.runs.scoring import tuning
from personafl.runs.sizes import measure
from personafl.runs.start import START_FILE
from personafl.runs.tracking import Tracker
from personafl.simulate.calibrate import calibrated
from personafl.storage.failure import FAILURE_FILE
from personafl.storage.files import atomic_write, write_json
from personafl.storage.rundir import Checkpoint, RunDirectory
from personafl.storage.seals import sealed
from personafl.uploads.private import Private


def run_job(job: Job, directory: RunDirectory, listener: Listener | None = None) -> Result:
    """Run a job in its directory from its last checkpoint to the end, and return the result."""
    with directory.locked():
        job.check_begun(directory)
        (directory.path / FAILURE_FILE).unlink(missing_ok=True)  # it is tried again
        checkpoint = directory.checkpoint()
        directory.rewind(checkpoint)
        if listener is not None and not checkpoint.rounds:
            for note in job.notes:
                listener(Note(f"note: {note}", shared=True))
        job = _calibrated(job, directory, checkpoint, listener)
        with contextlib.closing(Tracker(job.recipe, directory.path, directory.metrics())) as tracker:
            run = Run(job, directory, checkpoint, tracker, listener)
            try:
                _train(run, listener)
                _tune(run, listener)
                with attempt(run.directory.path, f"after round {job.recipe.rounds}"):
                    result = _finish(run)
            finally:
                run.simulation.workers.close()
            tracker.finish(result.rows)
        write_json(directory.path / "result.json", result.to_json())
        return result


def _calibrated(job: Job, directory: RunDirectory, checkpoint: Checkpoint, listener: Listener | None) -> Job:
    """Return the job with the faster engines, where the recipe leaves that open."""
    file, engine = directory.path / "engine.json", job.recipe.engine
    if engine.strategy != "auto" or (checkpoint.rounds and not file.exists()):  # begun before choices were kept
        return job
    with attempt(directory.path, "round 1"):  # clients are trained for it
        federation, notes = calibrated(job.federation, engine.memory_mb * 2**20, file)
    if listener is not None:
        for note in notes:
            listener(Note(note))
    return dataclasses.replace(job, federation=federation)


def _train(run: Run, listener: Listener | None) -> None:
    """Do the rounds that are left."""
    recipe, every = run.job.recipe, run.job.recipe.evaluate_every()
    accuracy, begun, last = None, run.total, affordable(recipe, run.job.federation)
    with polite_stop() as stop:
        for number in range(begun.rounds, last):
            began, charge = time.monotonic(), _charge(run)
            with attempt(run.directory.path, f"round {number + 1}"):
                done = run.simulation.step(number)
            spent = time.monotonic() - began
            loss = done.loss if math.isfinite(done.loss) else None  # nobody took part; JSON has no NaN
            facts = {key: value for key, value in vars(done).items() if value is not None}
            run.record({"event": "round", **facts, **charge, "loss": loss, "seconds": spent})
            run.warn(number, run.alarms.trained(number, done.loss))
            if number + 1 == last < recipe.rounds:
                run.warn(number, [("privacy", f"the budget is spent after round {last} of {recipe.rounds}")])
            if every and (number + 1) % every == 0 and number + 1 < last:
                with attempt(run.directory.path, f"after round {number + 1}"):
                    accuracy = record_scores(run, number, done.time)
            run.add(done, spent)
            run.save(recipe.engine.checkpoint_seconds)
            if listener is not None:
                seconds, rounds = run.total.seconds - begun.seconds, number + 1 - begun.rounds
                listener(Progress(done, recipe.rounds, accuracy, seconds, rounds))
            if stop.requested:
                run.stop(f"after round {number + 1} of {recipe.rounds}")
    run.save(0)


def _charge(run: Run) -> dict[str, Any]:
    """Return what the next round costs, for its line: the lines are the ledger of a run with [privacy]."""
    if run.job.recipe.privacy is None or not isinstance(state := run.simulation.server, Private):
        return {}
    return {"privacy": charged(run.job.recipe, run.job.federation, float(state.clip))}


def _tune(run: Run, listener: Listener | None) -> None:
    """Fine-tune, chunk by chunk, everyone who has no model of its own yet, and with `finetune` everyone."""
    job, data, simulation, tuned = run.job, run.job.federation.data, run.simulation, run.tuned
    if not job.federation.algorithm.client.tuning:
        return
    everyone = np.concatenate([data.seen, data.unseen])
    waiting = everyone[~tuned.has(everyone) & (job.recipe.finetune | ~simulation.have_models(everyone))]
    before = len(tuned)
    chunks, began = tuning(simulation, tuned, waiting, job.recipe.rounds), time.monotonic()
    with polite_stop() as stop:
        while _has_next(chunks, run):
            run.add(None, time.monotonic() - began)
            run.save(job.recipe.engine.checkpoint_seconds)
            if listener is not None:
                listener(Tuning(len(tuned), before + len(waiting)))
            if stop.requested:
                run.stop(f"while fine-tuning, {len(tuned)} of {before + len(waiting)} clients done")
            began = time.monotonic()
    run.save(0)


def _has_next(chunks: Iterator[Clients], run: Run) -> bool:
    """Fine-tune a chunk of clients; say whether there was one."""
    with attempt(run.directory.path, f"after round {run.job.recipe.rounds}"):
        return next(chunks, None) is not None


def _finish(run: Run) -> Result:
    """Score what came out, and write all but result.json, which says that the run is done."""
    path, job, data = run.directory.path, run.job, run.job.federation.data
    scored, last = score_all(run, final=True), run.total.rounds - 1
    run.warn(last, run.alarms.scored(last, data.seen, scored["seen"].scores) if "seen" in scored else [])
    record_forms(run, last, run.total.time)
    members = {"seen": data.seen, "unseen": data.unseen}
    sizes = {name: measure(run.simulation, run.tuned, members[name]) for name in scored}
    shared = run.simulation.global_model(run.simulation.down())  # of several servers the mean; runs may start from it
    result = make_result(path, job.recipe, job.federation, scored, run.total, sizes)
    atomic_write(path / START_FILE, *sealed(wire.encode(shared or {})))
    atomic_write(path / "clients.csv", result.clients_csv().encode())
    return result
