"""One run from start to result: rounds, scoring, checkpoints. The loop reads top to bottom in `_train`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import personafl.data.build as data_build
from personafl import __version__
from personafl.algorithms.uplink import compressed
from personafl.core import rng, wire
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.losses import TASKS
from personafl.core.net import Net
from personafl.core.split import Split
from personafl.core.tree import Params
from personafl.data.describe import sketch
from personafl.data.federated import FederatedData
from personafl.data.inputs import as_seen
from personafl.data.spelling import SPACE_NAME
from personafl.errors import BadInput, Diverged, Interrupted
from personafl.evaluate.summary import summarize
from personafl.models import default_model, make_net_and_split
from personafl.models.adapters import is_adapter
from personafl.recipe.devices import OwnNetwork, check_method, deal, own_nets
from personafl.recipe.recipe import CompareSection, Recipe
from personafl.recipe.values import read_toml
from personafl.runs.compactness import observe
from personafl.runs.interrupt import polite_stop
from personafl.runs.result import Result, make_result
from personafl.runs.scoring import Scored, score, tune
from personafl.runs.sizes import measure
from personafl.runs.tracking import Tracker, check_tracking
from personafl.simulate.buffered import make_buffer
from personafl.simulate.calibrate import calibrated
from personafl.simulate.cloud import make_cloud, make_simulation
from personafl.simulate.engine import Engine
from personafl.simulate.federation import Federation
from personafl.simulate.hardware import named_device, placed, set_arithmetic
from personafl.simulate.simulator import Round, Simulation
from personafl.simulate.workers.local import on_other_machines
from personafl.storage.files import atomic_write, read_json, write_json
from personafl.storage.rundir import Checkpoint, RunDirectory, resume_command
from personafl.storage.store import Store

START_FILE = "global.safetensors"


@dataclass(frozen=True)
class Progress:
    """What a display is told after each round."""

    round: Round
    rounds: int
    accuracy: float | None  # of the last scoring: personal if the method has one, else global
    seconds: float  # of training in this process
    done: int  # rounds done in this process


@dataclass(frozen=True)
class Tuning:
    """What a display is told while clients are fine-tuned."""

    done: int
    clients: int


@dataclass(frozen=True)
class Note:
    """A line that a display prints."""

    text: str


Listener = Callable[[Progress | Tuning | Note], None]


@dataclass(frozen=True)
class Job:
    """A run that is ready to start: everything was checked."""

    recipe: Recipe
    federation: Federation
    objects: tuple[str, ...] = ()  # what was given as an object, so that the recipe alone cannot repeat the run

    def files(self) -> dict[str, str]:
        """The first files of its run directory."""
        data = self.federation.data
        split = {
            "fingerprint": data.fingerprint,
            "name": data.name,
            "clients": data.clients,
            "seen": data.seen.tolist(),
            "unseen": data.unseen.tolist(),
            "notes": list(data.notes),
            "normalize": None if data.moments is None else data.moments.model_dump(),
            "samples": {name: data.rows(name).sizes.tolist() for name in ("train", "validation", "test")},
            "picture": sketch(data),
        }
        return {
            "recipe.toml": self.recipe.to_toml(),
            "environment.json": json.dumps({**environment(), "objects": list(self.objects)}, indent=1),
            "split.json": json.dumps(split),
        }


def environment() -> dict[str, Any]:
    """What a run depends on besides its recipe."""
    packages = ("torch", "numpy", "scikit-learn", "safetensors")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": sys.argv,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "packages": {"personafl": __version__, **{name: version(name) for name in packages}},
    }


def prepare(
    recipe: Recipe,
    data: FederatedData | None = None,
    model: nn.Module | None = None,
    algorithm: Algorithm | None = None,
    profiles: NDArray[np.int64] | None = None,
    make: Callable[..., tuple[Net, Split | None]] = make_net_and_split,
) -> Job:
    """Check a recipe against its data and build what the run needs; objects given here replace the recipe's.

    `profiles` are the kinds of devices, [clients], where they are known and need not be dealt. `make` makes the network
    and its split; who prepares many runs need not have each network made again.
    """
    objects = tuple(name for name, given in (("model", model), ("algorithm", algorithm)) if given is not None)
    algorithm = compressed(algorithm or recipe.algorithm(), recipe.uplink)  # first: it is quick to fail
    check_method(recipe.devices, algorithm)
    recipe.federation.check_offline(algorithm)
    check_tracking(recipe.tracking)
    device = named_device(recipe.engine.device)
    if device.type != "cpu" and on_other_machines():
        raise BadInput(f"engine.device: a Ray cluster trains on CPUs, not on {device.type}; set engine.device=cpu")
    dtype = torch.float64 if recipe.engine.dtype == "float64" else torch.float32
    set_arithmetic(recipe.engine.dtype, device)
    if recipe.engine.threads is not None:
        torch.set_num_threads(recipe.engine.threads)
    data = as_seen(data or data_build.load(recipe.data, recipe.seed), recipe.data, dtype)
    if recipe.evaluation.split == "validation" and not len(data.validation.flat):
        raise BadInput("evaluation.split: there are no validation data to score on; set data.validation=0.2")
    cohort = recipe.federation.size(len(data.seen))
    kinds = deal(recipe.devices, data, recipe.seed) if profiles is None else profiles
    cloud = None
    if recipe.cloud is not None:
        cloud = make_cloud(recipe.cloud, data, algorithm, recipe.training.build().work, recipe.seed)
    buffer = None
    if recipe.buffer is not None:
        buffer = make_buffer(recipe.buffer, data, algorithm, recipe.training.build().work, recipe.seed)
    data = placed(data, device, dtype, recipe.engine.data_mb)
    name = default_model(data) if recipe.model.name == "auto" else recipe.model.name
    section, task = recipe.model, TASKS[data.task]
    try:
        net, split = make(
            model or name,
            section.model_extra or {},
            data,
            section.buffers,
            section.personal or algorithm.personal,
            section.adapter,
            section.adapter_size,
        )
    except BadInput as error:
        if section.personal is None and str(error).startswith("model.personal:"):
            raise BadInput(f"{error} ({algorithm.personal!r} is the default of {algorithm.name})") from error
        raise
    edits = None if task.edits is None else functools.partial(task.edits, space=data.label_number(SPACE_NAME))
    shared = Problem(net.to(device, dtype), task.loss, split=split, correct=task.correct, edits=edits)
    problems = _per_device(recipe, shared, data, named=model is None, device=device, dtype=dtype)
    start = net.init(rng.generator(recipe.seed, "start"))
    if recipe.start is not None:
        start = warm_start(Path(recipe.start), start)
    memory = recipe.engine.memory_mb * 2**20
    federation = Federation(
        algorithm=algorithm,
        data=data,
        problems=problems,
        problem_of=kinds,
        engines=tuple(
            Engine.fitted(problem, recipe.engine.strategy, memory, device, bfloat16=recipe.engine.dtype == "bfloat16")
            for problem in problems
        ),
        seed=recipe.seed,
        cohort=cohort,
        sampling=recipe.federation.sampling,
        weights=recipe.federation.weights,
        dtype=dtype,
        start=start,
        offline=recipe.federation.offline,
        cloud=cloud,
        buffer=buffer,
        workers=recipe.engine.workers if device.type == "cpu" else 1,
    )
    algorithm.server.init(shared, start, federation.population)  # a method that needs a split says so here
    return Job(recipe, federation, objects)


def _per_device(
    recipe: Recipe, shared: Problem, data: FederatedData, *, named: bool, device: torch.device, dtype: torch.dtype
) -> tuple[Problem, ...]:
    """Return the problem of each device profile, or the one of all; `named`: the recipe names the shared network."""
    if not recipe.devices:
        return (shared,)
    known = None
    if named and not any(map(is_adapter, shared.net.shapes)):
        section = OwnNetwork(name=recipe.model.name, buffers=recipe.model.buffers, **(recipe.model.model_extra or {}))
        known = section.resolved(data), shared.net
    nets = own_nets(recipe.devices, data, known, device, dtype)
    return tuple(
        dataclasses.replace(shared, local_net=net, bits=profile.bits, penalty=profile.penalty)
        for profile, net in zip(recipe.devices, nets, strict=True)
    )


def warm_start(run: Path, fresh: Params) -> Params:
    """Return `fresh` with the global model of a finished run put in, by name; only adapters may be missing there."""
    path = run / START_FILE
    try:
        found = wire.decode_named(path.read_bytes())
    except OSError as error:
        raise BadInput(f"start: {path} cannot be read; give the directory of a finished run") from error
    if not found:
        raise BadInput(f"start: {run} has no global model to start from")
    wrong = sorted(name for name in found if name not in fresh or found[name].shape != fresh[name].shape)
    missing = sorted(name for name in fresh if name not in found and not is_adapter(name))
    if wrong or missing:
        names = ", ".join((wrong or missing)[:5])
        what = "does not fit this model" if wrong else "is missing there"
        raise BadInput(f"start: the model of {run} is another one: {names} {what}; use the same model as that run")
    return {name: found.get(name, value).to(value.dtype) for name, value in fresh.items()}


def run_job(job: Job, directory: RunDirectory, listener: Listener | None = None) -> Result:
    """Run a job in its directory from its last checkpoint to the end, and return the result."""
    with directory.locked():
        _check_same_job(directory, job)
        checkpoint = directory.checkpoint()
        directory.rewind(checkpoint)
        job = _calibrated(job, directory, checkpoint, listener)
        with contextlib.closing(Tracker(job.recipe, directory.path, directory.metrics())) as tracker:
            progress = _Run(job, directory, checkpoint, tracker)
            try:
                _train(job, progress, listener)
            finally:
                progress.simulation.workers.close()
            _tune(job, progress, listener)
            result = _finish(job, progress)
            tracker.finish(result.rows)
        write_json(directory.path / "result.json", result.to_json())
        return result


def _calibrated(job: Job, directory: RunDirectory, checkpoint: Checkpoint, listener: Listener | None) -> Job:
    """Return the job with the faster engines, where the recipe leaves that open."""
    file, engine = directory.path / "engine.json", job.recipe.engine
    if engine.strategy != "auto" or (checkpoint.rounds and not file.exists()):  # begun before choices were kept
        return job
    federation, notes = calibrated(job.federation, engine.memory_mb * 2**20, file)
    if listener is not None:
        for note in notes:
            listener(Note(note))
    return dataclasses.replace(job, federation=federation)


def _finish(job: Job, progress: _Run) -> Result:
    """Score what came out, and write all but result.json, which says that the run is done."""
    path, data = progress.directory.path, job.federation.data
    scored = _score(progress, job, True)
    _record_forms(progress, job, _when(progress.total.rounds - 1, progress.total.time))
    members = {"seen": data.seen, "unseen": data.unseen}
    sizes = {name: measure(progress.simulation, progress.tuned, members[name]) for name in scored}
    result = make_result(path, job.recipe, job.federation, scored, progress.total, sizes)
    atomic_write(path / START_FILE, wire.encode(_global_model(progress.simulation)))
    atomic_write(path / "clients.csv", result.clients_csv().encode())
    return result


def _global_model(simulation: Simulation) -> Params:
    """Return the shared model, of several servers their mean, for runs that start from it; nothing if there is none."""
    fed, down = simulation.federation, simulation.down()
    return fed.algorithm.client.models(fed.problems[0], down, simulation.shape(0, down)).get("global", {})


def _check_same_job(directory: RunDirectory, job: Job) -> None:
    """Refuse to continue a run as a different one: the result would belong to neither."""
    before = Recipe.parse(read_toml(directory.path / "recipe.toml"), str(directory.path / "recipe.toml"))
    old, new = (recipe.model_copy(update={"compare": CompareSection()}) for recipe in (before, job.recipe))
    if old.to_toml() != new.to_toml():
        keys = ", ".join(key for key in Recipe.model_fields if getattr(old, key) != getattr(new, key))
        raise BadInput(f"{directory.path}: was begun with another recipe (see {keys}); choose another --out")
    begun = read_json(directory.path / "environment.json")
    objects = begun["objects"]
    if list(job.objects) != objects:
        call = ", ".join(f"{name}=…" for name in objects) or "neither model nor algorithm"
        raise BadInput(
            f"{directory.path}: was begun in Python with {call}; "
            "continue it there: personafl.run(…, the same arguments, resume=True)"
        )
    torch.set_num_threads(begun["threads"])  # more or fewer may sum in another order


def _train(job: Job, progress: _Run, listener: Listener | None) -> None:
    """Do the rounds that are left."""
    recipe, every = job.recipe, job.recipe.evaluate_every()
    accuracy, begun = None, progress.total
    with polite_stop() as stop:
        for number in range(begun.rounds, recipe.rounds):
            began = time.monotonic()
            try:
                done = progress.simulation.step(number)
            except Diverged as error:
                raise progress.kept(error) from error
            spent = time.monotonic() - began
            loss = done.loss if math.isfinite(done.loss) else None  # nobody took part; JSON has no NaN
            facts = {key: value for key, value in vars(done).items() if value is not None}
            progress.record({"event": "round", **facts, "loss": loss, "seconds": spent})
            if every and (number + 1) % every == 0 and number + 1 < recipe.rounds:
                accuracy = _record_scores(progress, job, done)
            progress.add(done, spent)
            progress.save(recipe.engine.checkpoint_seconds)
            if listener is not None:
                seconds, rounds = progress.total.seconds - begun.seconds, number + 1 - begun.rounds
                listener(Progress(done, recipe.rounds, accuracy, seconds, rounds))
            if stop.requested:
                progress.stop(f"after round {number + 1} of {recipe.rounds}")
    progress.save(0)


def _tune(job: Job, progress: _Run, listener: Listener | None) -> None:
    """Fine-tune, chunk by chunk, everyone who has no model of its own yet, and with `finetune` everyone."""
    data, simulation, tuned = job.federation.data, progress.simulation, progress.tuned
    if not job.federation.algorithm.client.tuning:
        return
    everyone = np.concatenate([data.seen, data.unseen])
    waiting = everyone[~tuned.has(everyone) & (job.recipe.finetune | ~simulation.have_models(everyone))]
    before = len(tuned)
    with polite_stop() as stop:
        for _, _, chunk in simulation.groups(waiting):
            began = time.monotonic()
            try:
                tune(simulation, tuned, chunk, job.recipe.rounds)
            except Diverged as error:
                raise progress.kept(error) from error
            progress.add(None, time.monotonic() - began)
            progress.save(job.recipe.engine.checkpoint_seconds)
            if listener is not None:
                listener(Tuning(len(tuned), before + len(waiting)))
            if stop.requested:
                progress.stop(f"while fine-tuning, {len(tuned)} of {before + len(waiting)} clients done")
    progress.save(0)


class _Run:
    """A run in its directory: what is done and what of it is saved."""

    def __init__(self, job: Job, directory: RunDirectory, checkpoint: Checkpoint, tracker: Tracker) -> None:
        self.directory, self.total, self._saved = directory, checkpoint, time.monotonic()
        self._tracker = tracker
        budget = job.recipe.engine.store_mb * 2**20
        store = Store(directory.path / "states", budget, checkpoint.states)
        self.tuned = Store(directory.path / "tuned", budget, checkpoint.tuned)
        server = directory.server_bytes(checkpoint) if checkpoint.rounds else None
        try:
            self.simulation = make_simulation(job.federation, store, server)
        except BadInput as error:
            raise BadInput(f"{directory.path}: the server's state after round {checkpoint.rounds}: {error}") from error

    def record(self, entry: dict[str, Any]) -> None:
        """Write a line of metrics, here and where the recipe tracks them."""
        self.directory.record(entry)
        self._tracker.metrics(entry)

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
        length = self.directory.record(durable=True)
        total = dataclasses.replace(self.total, states=states, tuned=tuned, metrics_bytes=length)
        self.directory.commit(total, wire.encode(self.simulation.saved()))
        self.simulation.store.collect()
        self.tuned.collect()
        self._saved = time.monotonic()

    def stop(self, when: str) -> NoReturn:
        """Save and stop because the user asked for it."""
        self.save(0)
        raise Interrupted(f"stopped {when}; continue with: {resume_command(self.directory.path)}")

    def kept(self, error: Diverged) -> Diverged:
        """Return the error with what is left of the run."""
        rounds = self.directory.checkpoint().rounds
        return Diverged(f"{error}; the checkpoint after round {rounds} is kept in {self.directory.path}")


def _score(progress: _Run, job: Job, final: bool) -> dict[str, Scored]:
    """Score some seen clients on test data; at the end everyone, also on validation data if there are any.

    A recipe may leave the test data unread, and have training data scored too.
    """
    data, blind = job.federation.data, job.recipe.evaluation.split == "validation"
    splits = {"validation": data.validation} if blind else {"test": data.test}
    choice = final and not blind and bool(len(data.validation.flat))
    if choice:
        splits["validation"] = data.validation
    if job.recipe.evaluation.train:
        splits["train"] = data.train
    groups = {"seen": data.seen, "unseen": data.unseen} if final else {"seen": _some(data.seen, job.recipe)}
    tuned = progress.tuned if final else None
    return {
        name: score(progress.simulation, tuned, members, splits, blends=choice)
        for name, members in groups.items()
        if len(members)
    }


def _some(clients: NDArray[np.int64], recipe: Recipe) -> NDArray[np.int64]:
    """Return the clients that are scored during training, in ascending order."""
    if len(clients) <= recipe.evaluation.clients:
        return clients
    generator = rng.numpy_generator(recipe.seed, "scored clients")
    return np.sort(generator.choice(clients, recipe.evaluation.clients, replace=False))


def _when(number: int, virtual: float | None) -> dict[str, Any]:
    return {"number": number} if virtual is None else {"number": number, "time": virtual}


def _record_scores(progress: _Run, job: Job, done: Round) -> float:
    accuracy = 0.0
    when = _when(done.number, done.time)
    for clients, scored in _score(progress, job, False).items():
        for (model, split), scores in sorted(scored.scores.items()):
            summary = summarize(scores.accuracy, scores.loss, scores.samples, scores.word_error)
            progress.record(
                {
                    "event": "score",
                    **when,
                    **{key: value for key, value in vars(summary).items() if value is not None},
                    "count": summary.clients,
                    "clients": clients,
                    "model": model,
                    "split": split,
                }
            )
            accuracy = accuracy if split == "train" else summary.mean  # "global" sorts before "personal"
    _record_forms(progress, job, when)
    return accuracy


def _record_forms(progress: _Run, job: Job, when: dict[str, Any]) -> None:
    """Record what the personal models have become."""
    for facts in observe(progress.simulation, job.federation.data.seen):
        progress.directory.record({"event": "form", **when, **facts})
