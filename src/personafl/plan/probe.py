"""A short run of one method on this machine, with all that a long one does: what each part of it takes.

Two rounds go through the whole loop, from loading to result.json, in a temporary directory; then rounds alone are
timed. Where there are many clients, only some of them take part, and what is done once per client is scaled.
"""

import dataclasses
import functools
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import personafl.data.build as data_build
from personafl.core import wire
from personafl.core.algorithm import for_returning
from personafl.data.config import DataConfig
from personafl.data.federated import FederatedData
from personafl.recipe.recipe import Recipe
from personafl.report.page import write_page
from personafl.runs.build import prepare
from personafl.runs.job import Job
from personafl.runs.listener import Progress
from personafl.runs.loop import run_job
from personafl.simulate.cloud import make_simulation
from personafl.simulate.simulator import Simulation
from personafl.storage.rundir import RunDirectory
from personafl.storage.store import Store

ROUNDS = 2  # of the short run: in the second, models are scored between rounds as in a long one
CLIENTS = 256  # seen ones that take part, if a cohort is not larger; and a quarter of that of the unseen
TIMED = (3, 40)  # rounds to time at least and at most
SECONDS = 3.0  # to time rounds for


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """A round once it is warm: means."""

    seconds: float
    clients: float  # that train in it
    bytes_up: float
    bytes_down: float  # to clients that are known
    newcomer: float  # bytes that a newcomer is sent more
    state: float  # bytes of a client that took part
    keeps: bool  # whether there is a model in its state
    held: int  # clients whose states were kept


@dataclass(frozen=True, kw_only=True)
class Files:
    """What a run directory takes: bytes."""

    fixed: int
    clients: int  # of files with something for each client
    tuned: float  # of a client that was fine-tuned
    round: float  # of the line of a round
    scoring: int  # of the lines of a scoring


class Page(NamedTuple):
    """What the page of the results takes."""

    seconds: float
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What the parts of a run take: seconds, and bytes."""

    seen: int  # clients of the recipe
    unseen: int
    scale: float  # clients of the recipe per client of the probe
    load: float  # of data
    prepare: float
    imports: float  # what preparing takes more in a new process
    first_round: float
    scoring: float
    tuning: float  # of a client
    tunes: bool  # whether clients are fine-tuned at the end
    ending: float  # the last scoring, and what is written
    rounds: Rounds
    files: Files
    page: Page
    memory: float  # of the process at most, so far


def probe(recipe: Recipe) -> Probe:
    """Measure a run; the recipe is of one method, and without stage (a)."""
    began = time.monotonic()
    data = _load(recipe.data, recipe.seed)
    loaded = time.monotonic()
    few = _fewer(data, recipe)
    short = _short(recipe, len(data.seen))
    prepare(short, few)
    imported = time.monotonic()
    job = prepare(short, few)
    ready = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="personafl-plan-") as folder:
        path = Path(folder) / "run"
        marks = [time.monotonic()]  # after each round, and the scoring that comes with it
        result = run_job(
            job,
            RunDirectory.create(path, job.files()),
            lambda progress: marks.append(time.monotonic()) if isinstance(progress, Progress) else None,
        )
        whole = time.monotonic() - marks[0]
        spent = [entry["seconds"] for entry in RunDirectory(path).metrics() if entry["event"] == "round"]
        total = RunDirectory(path).checkpoint()
        scoring = marks[1] - marks[0] - spent[0] if len(spent) > 1 else 0.0
        tuned = len(Store(path / "tuned", 0, total.tuned))
        files, memory = _files(path, tuned), result.peak_memory_mb * 2**20
        page = _page(path)
        rounds = _timed(job, Path(folder), recipe.rounds)
    return Probe(
        seen=len(data.seen),
        unseen=len(data.unseen),
        scale=data.clients / (len(few.seen) + len(few.unseen)),
        load=loaded - began,
        prepare=ready - imported,
        imports=max(0.0, 2 * imported - loaded - ready),
        first_round=spent[0] if spent else 0.0,
        scoring=scoring,
        tuning=(total.seconds - sum(spent)) / max(1, tuned),
        tunes=bool(job.federation.algorithm.client.tuning),
        ending=whole - total.seconds - scoring,
        rounds=rounds,
        files=files,
        page=page,
        memory=memory,
    )


@functools.lru_cache(maxsize=1)  # the methods of a comparison share it
def _load(config: DataConfig, seed: int) -> FederatedData:
    return data_build.load(config, seed)


def _fewer(data: FederatedData, recipe: Recipe) -> FederatedData:
    """Return the data with fewer clients, if there are many and who takes part does not depend on all of them."""
    if recipe.cloud is not None or recipe.buffer is not None or recipe.devices:
        return data
    seen = max(CLIENTS, recipe.federation.size(len(data.seen)))
    return dataclasses.replace(data, seen=_some(data.seen, seen), unseen=_some(data.unseen, CLIENTS // 4))


def _some(clients: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    return clients if len(clients) <= count else clients[np.linspace(0, len(clients) - 1, count).astype(np.int64)]


def _short(recipe: Recipe, seen: int) -> Recipe:
    """Return the recipe of the probe: few rounds, a scoring after the first, as many clients a round, no tracking."""
    section, alike = recipe.federation, {}
    if recipe.cloud is None and recipe.buffer is None:
        offline = section.offline if isinstance(section.offline, int) else round(section.offline * seen)
        alike = {"cohort": section.size(seen), "offline": offline}
    return recipe.model_copy(
        update={
            "rounds": min(ROUNDS, recipe.rounds),
            "federation": section.model_copy(update=alike),
            "evaluation": recipe.evaluation.model_copy(update={"every": 1}),
            "tracking": (),
        }
    )


def _files(path: Path, tuned: int) -> Files:
    """Measure a run directory in which so many clients were fine-tuned."""
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    rounds = [len(line) for line in lines if '"event": "round"' in line]
    scores = [len(line) for line in lines if '"event": "score"' in line]
    clients = sum(size_of(path / name) for name in ("result.json", "clients.csv", "split.json"))
    growing = sum(size_of(path / name) for name in ("states", "tuned", "metrics.jsonl"))
    return Files(
        fixed=size_of(path) - clients - growing,
        clients=clients,
        tuned=size_of(path / "tuned") / max(1, tuned),
        round=sum(rounds) / max(1, len(rounds)),
        scoring=sum(scores),
    )


def _page(path: Path) -> Page:
    began = time.monotonic()
    page = write_page([path])
    return Page(time.monotonic() - began, size_of(page))


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _timed(job: Job, folder: Path, most: int) -> Rounds:
    """Time rounds without the loop; the first, in which all clients are new, does not count."""
    simulation = make_simulation(job.federation, Store(folder / "states", job.recipe.engine.store_mb * 2**20))
    done, seconds = [], []
    for number in range(min(most, TIMED[1])):
        began = time.monotonic()
        done.append(simulation.step(number))
        seconds.append(time.monotonic() - began)
        if len(done) > TIMED[0] and sum(seconds) > SECONDS:
            break
    later = done[1:] or done
    clients = _mean([each.clients for each in later])
    plain = job.federation.cloud is None and job.federation.buffer is None
    message = simulation.broadcast()
    again = wire.size(for_returning(message))
    rounds = Rounds(
        seconds=_mean(seconds[1:] or seconds),
        clients=clients,
        bytes_up=_mean([each.bytes_up for each in later]),
        bytes_down=clients * again if plain else _mean([each.bytes_down for each in later]),
        newcomer=wire.size(message) - again if plain else 0,
        state=_state(simulation),
        keeps=any(simulation.has_model(client) for client in map(int, job.federation.data.seen)),
        held=len(simulation.store),
    )
    simulation.workers.close()  # with states that are not here
    return rounds


def _state(simulation: Simulation) -> float:
    """Return the mean size of the states that are kept, each with the number of its client."""
    known = [client for client in map(int, simulation.federation.data.seen) if client in simulation.store]
    entries = [simulation.store.get(client).values() for client in known]
    return _mean([8 + sum(leaf.numel() * leaf.element_size() for leaf in entry) for entry in entries])


def _mean(values: list[float] | list[int]) -> float:
    return float(np.mean(values)) if values else 0.0
