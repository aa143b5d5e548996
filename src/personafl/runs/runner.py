"""One run from start to result: rounds, scoring, checkpoints. The loop reads top to bottom in `_train`."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import nn

import personafl.data.build as data_build
from personafl.core import wire
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.losses import cross_entropy
from personafl.data.federated import FederatedData
from personafl.errors import BadInput, Diverged, Interrupted
from personafl.evaluate.summary import summarize
from personafl.models import default_model, make_net
from personafl.runs.engine import Engine
from personafl.runs.files import atomic_write, read_json, write_json
from personafl.runs.interrupt import polite_stop
from personafl.runs.recipe import CompareSection, Recipe, read_toml
from personafl.runs.result import Result, Scored, make_result
from personafl.runs.rundir import Checkpoint, RunDirectory, resume_command
from personafl.runs.simulator import Federation, Round, Simulation
from personafl.runs.store import Store

__all__ = ["Job", "Progress", "prepare", "run_job"]


@dataclass(frozen=True)
class Progress:
    """What a display is told after each round."""

    round: Round
    rounds: int
    accuracy: float | None  # of the last scoring: personal if the method has one, else global
    seconds: float  # of training in this process
    done: int  # rounds done in this process


Listener = Callable[[Progress], None]


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
            "samples": {name: data.rows(name).sizes.tolist() for name in ("train", "validation", "test")},
        }
        return {
            "recipe.toml": self.recipe.to_toml(),
            "environment.json": json.dumps({**environment(), "objects": list(self.objects)}, indent=1),
            "split.json": json.dumps(split),
        }


def environment() -> dict[str, Any]:
    """What a run depends on besides its recipe."""
    packages = ("personafl", "torch", "numpy", "scikit-learn", "safetensors")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": sys.argv,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "packages": {name: version(name) for name in packages},
    }


def prepare(
    recipe: Recipe,
    data: FederatedData | None = None,
    model: nn.Module | None = None,
    algorithm: Algorithm | None = None,
) -> Job:
    """Check a recipe against its data and build what the run needs; objects given here replace the recipe's."""
    objects = tuple(name for name, given in (("model", model), ("algorithm", algorithm)) if given is not None)
    algorithm = algorithm or recipe.algorithm()  # first: it is quick to fail
    device = _device(recipe.engine.device)
    dtype = torch.float64 if recipe.engine.dtype == "float64" else torch.float32
    if recipe.engine.threads is not None:
        torch.set_num_threads(recipe.engine.threads)
    data = data or data_build.load(recipe.data, recipe.seed)
    cohort = recipe.federation.size(len(data.seen))
    x = data.x.to(device, dtype) if data.x.is_floating_point() else data.x.to(device)
    data = dataclasses.replace(data, x=x, y=data.y.to(device))
    name = default_model(data) if recipe.model.name == "auto" else recipe.model.name
    net = make_net(model or name, recipe.model.model_extra or {}, data, recipe.model.buffers).to(device, dtype)
    problem = Problem(net, cross_entropy)
    engine = Engine.fitted(problem, recipe.engine.strategy, recipe.engine.memory_mb * 2**20, device)
    federation = Federation(
        algorithm=algorithm,
        data=data,
        problems=(problem,),
        problem_of=np.zeros(data.clients, dtype=np.int64),
        engines=(engine,),
        seed=recipe.seed,
        cohort=cohort,
        sampling=recipe.federation.sampling,
        weights=recipe.federation.weights,
        dtype=dtype,
    )
    return Job(recipe, federation, objects)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BadInput(
            f"engine.device: {name!r} is not available here ({str(error).splitlines()[0]}); use cpu"
        ) from error
    return device


def run_job(job: Job, directory: RunDirectory, listener: Listener | None = None) -> Result:
    """Run a job in its directory from its last checkpoint to the end, and return the result."""
    with directory.locked():
        _check_same_job(directory, job)
        checkpoint = directory.checkpoint()
        directory.rewind(checkpoint)
        budget = job.recipe.engine.store_mb * 2**20
        store = Store(directory.path / "states", budget, checkpoint.states)
        server = directory.server_bytes(checkpoint) if checkpoint.rounds else None
        try:
            simulation = Simulation(job.federation, store, server)
        except BadInput as error:
            raise BadInput(f"{directory.path}: the server's state after round {checkpoint.rounds}: {error}") from error
        checkpoint = _train(job, directory, simulation, checkpoint, listener)
        result = make_result(directory.path, job.recipe, job.federation, _score(simulation, job, True), checkpoint)
        atomic_write(directory.path / "clients.csv", result.clients.to_csv(index=False).encode())
        write_json(directory.path / "result.json", result.to_json())
        return result


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


def _train(
    job: Job, directory: RunDirectory, simulation: Simulation, checkpoint: Checkpoint, listener: Listener | None
) -> Checkpoint:
    recipe, every = job.recipe, job.recipe.evaluate_every()
    total, saved, accuracy = checkpoint, time.monotonic(), None

    def commit() -> None:
        states = simulation.store.flush()
        length = directory.record(durable=True)
        directory.commit(
            dataclasses.replace(total, states=states, metrics_bytes=length), wire.encode(simulation.server)
        )
        simulation.store.collect()

    with polite_stop() as stop:
        for number in range(checkpoint.rounds, recipe.rounds):
            began = time.monotonic()
            try:
                done = simulation.step(number)
            except Diverged as error:
                kept = directory.checkpoint().rounds
                raise Diverged(f"{error}; the checkpoint after round {kept} is kept in {directory.path}") from error
            spent = time.monotonic() - began
            loss = done.loss if math.isfinite(done.loss) else None  # nobody took part; JSON has no NaN
            directory.record({"event": "round", **vars(done), "loss": loss, "seconds": spent})
            if every and (number + 1) % every == 0 and number + 1 < recipe.rounds:
                accuracy = _record_scores(directory, simulation, job, number + 1)
            total = dataclasses.replace(
                total,
                rounds=number + 1,
                bytes_down=total.bytes_down + done.bytes_down,
                bytes_up=total.bytes_up + done.bytes_up,
                seconds=total.seconds + spent,
            )
            if time.monotonic() - saved >= recipe.engine.checkpoint_seconds:
                commit()
                saved = time.monotonic()
            if listener is not None:
                listener(
                    Progress(
                        done,
                        recipe.rounds,
                        accuracy,
                        total.seconds - checkpoint.seconds,
                        number + 1 - checkpoint.rounds,
                    )
                )
            if stop.requested:
                commit()
                raise Interrupted(
                    f"stopped after round {number + 1} of {recipe.rounds}; "
                    f"continue with: {resume_command(directory.path)}"
                )
    commit()
    return total


def _score(simulation: Simulation, job: Job, final: bool) -> Scored:
    """Score seen and unseen clients on what they have: test, and validation if there is any."""
    data = job.federation.data
    splits = {"test": data.test}
    if final and len(data.validation.flat):
        splits["validation"] = data.validation
    groups = {"seen": data.seen, "unseen": data.unseen} if final else {"seen": data.seen}
    return {
        (clients, *key): scores
        for clients, members in groups.items()
        if len(members)
        for key, scores in simulation.score(members, splits, job.recipe.rounds, personalize=final).items()
    }


def _record_scores(directory: RunDirectory, simulation: Simulation, job: Job, number: int) -> float:
    accuracy = 0.0
    for (clients, model, split), scores in sorted(_score(simulation, job, False).items()):
        summary = summarize(scores.accuracy, scores.loss, scores.samples)
        directory.record(
            {
                "event": "score",
                "number": number - 1,
                **vars(summary),
                "count": summary.clients,
                "clients": clients,
                "model": model,
                "split": split,
            }
        )
        accuracy = summary.mean  # "global" sorts before "personal"
    return accuracy
