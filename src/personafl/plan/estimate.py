"""From a probe of each method to what a run or comparison will take: time, memory, disk, bytes.

Who takes part is reckoned by expectation: of n clients, c a round, n·(1 − (1 − c/n)^R) took part after R rounds.
"""

import math
import multiprocessing
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from personafl.errors import BadInput
from personafl.plan.probe import Probe, probe
from personafl.recipe.method import PretrainSection
from personafl.recipe.recipe import Recipe
from personafl.runs.start import settled
from personafl.simulate.workers.local import end_with_parent

Listener = Callable[[int, int], None]  # (methods probed, of how many)
DAY = 86400.0
PRETRAIN = "pretrain"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one run of a method takes."""

    method: str
    runs: int  # of it, one per seed
    seconds: float
    bytes_up: float
    bytes_down: float
    disk: float  # bytes
    memory: float  # bytes of the process


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all runs of a recipe take together, and what the machine has."""

    estimates: tuple[Estimate, ...]
    seconds: float
    disk: float
    memory: float
    free_disk: float
    machine_memory: float

    @property
    def bytes_up(self) -> float:
        """What all clients send."""
        return sum(each.runs * each.bytes_up for each in self.estimates)

    @property
    def bytes_down(self) -> float:
        """What all clients receive."""
        return sum(each.runs * each.bytes_down for each in self.estimates)

    @property
    def warnings(self) -> list[str]:
        """What will not go well, and what to do."""
        found = []
        if self.memory > self.machine_memory:
            found.append(
                f"memory: about {self.memory / 1e9:.1f} GB, and this machine has {self.machine_memory / 1e9:.1f} GB; "
                "lower engine.memory_mb and engine.store_mb, or take a smaller model"
            )
        if self.disk > self.free_disk:
            found.append(
                f"disk: about {self.disk / 1e9:.1f} GB, and {self.free_disk / 1e9:.1f} GB are free; "
                "choose another --out, or fewer clients or seeds"
            )
        if self.seconds > DAY:
            found.append(
                f"time: about {self.seconds / DAY:.1f} days; lower rounds or federation.cohort, or use a GPU "
                "(a run that is stopped continues with personafl resume)"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """Return it as `personafl plan --json` prints it."""
        total = {key: getattr(self, key) for key in ("seconds", "memory", "disk", "bytes_up", "bytes_down")}
        machine = {"free_disk": self.free_disk, "memory": self.machine_memory}
        methods = [vars(each) for each in self.estimates]
        return {"total": total, "machine": machine, "methods": methods, "warnings": self.warnings}


def make_plan(recipe: Recipe, folder: Path, listener: Listener | None = None) -> Plan:
    """Probe every method of the recipe's comparison, in a process of its own, and add up; runs will be in `folder`."""
    recipe = settled(recipe)
    seeds, methods = recipe.compare.seeds, recipe.compare.methods
    recipes = {method: recipe.for_method(method, seeds[0]) for method in methods}
    firsts = [first for one in recipes.values() if (first := one.for_pretraining()) is not None]
    stages = dict(zip([PRETRAIN], firsts, strict=False))  # one for all methods
    stages |= {name: one.model_copy(update={"pretrain": PretrainSection()}) for name, one in recipes.items()}
    probes: dict[str, Probe] = {}
    context = multiprocessing.get_context("spawn")  # its memory is that of the runs alone
    with ProcessPoolExecutor(1, mp_context=context, initializer=end_with_parent) as process:
        for name, one in stages.items():
            if listener is not None:
                listener(len(probes), len(stages))
            try:
                probes[name] = process.submit(probe, one).result()
            except BrokenProcessPool as error:
                raise BadInput(
                    f"{name}: the system ended the probe, most likely for lack of memory; "
                    "lower engine.memory_mb, or take a smaller model or cohort"
                ) from error
    estimates = tuple(estimate(name, stages[name], probes[name], len(seeds)) for name in stages)
    starting = sum(each.prepare for each in probes.values()) * (len(seeds) + 1)  # a comparison checks all first
    starting += max(each.imports for each in probes.values())
    loading = max(each.load for each in probes.values()) * len(seeds)
    page = max((each.page for each in probes.values()), key=lambda each: each.bytes)
    return Plan(
        estimates=estimates,
        seconds=loading + starting + page.seconds + sum(each.runs * each.seconds for each in estimates),
        disk=page.bytes + sum(each.runs * each.disk for each in estimates),
        memory=max(each.memory for each in estimates),
        free_disk=float(shutil.disk_usage(_existing(folder)).free),
        machine_memory=_machine_memory(),
    )


def estimate(method: str, recipe: Recipe, probed: Probe, seeds: int) -> Estimate:
    """Return what one run takes, by what its parts took."""
    per_round, files, rounds = probed.rounds, probed.files, recipe.rounds
    every = recipe.evaluate_every()
    scorings = max(0, math.ceil(rounds / every) - 1) if every else 0
    share = min(1.0, per_round.clients / probed.seen)
    taken = probed.seen * (1 - (1 - share) ** rounds)  # clients that took part
    tuned = _tuned(recipe, probed, taken)
    warm = per_round.seconds * max(0, rounds - 1) + (probed.first_round if rounds else 0.0)
    seconds = warm + scorings * probed.scoring * probed.scale + tuned * probed.tuning + probed.ending * probed.scale
    newcomers = taken if per_round.state else per_round.clients * rounds  # who has no state is not known
    pace = max(1, math.ceil(recipe.engine.checkpoint_seconds / max(1e-9, seconds / max(1, rounds))))
    states = stored(probed.seen, share, rounds, pace)
    disk = (
        files.fixed
        + files.clients * probed.scale
        + files.round * rounds
        + files.scoring * scorings
        + states * per_round.state
        + tuned * files.tuned
    )
    budget = recipe.engine.store_mb * 2**20
    held = min(budget, taken * per_round.state) + min(budget, tuned * files.tuned)
    probe_held = min(budget, per_round.held * per_round.state)
    return Estimate(
        method=method,
        runs=seeds,
        seconds=seconds,
        bytes_up=per_round.bytes_up * rounds,
        bytes_down=per_round.bytes_down * rounds + per_round.newcomer * newcomers,
        disk=disk,
        memory=probed.memory + max(0.0, held - probe_held),
    )


def _tuned(recipe: Recipe, probed: Probe, taken: float) -> float:
    """Return how many clients are fine-tuned after the rounds."""
    if not probed.tunes:
        return 0.0
    waiting = 0.0 if probed.rounds.keeps and not recipe.finetune else taken
    return probed.seen - taken + waiting + probed.unseen


def stored(clients: int, share: float, rounds: int, pace: int) -> float:
    """Return for how many states there is room on disk in the end, if they are saved every `pace` rounds.

    As the store does it: a new state takes another row than the saved one, whose row is free after the next save; where
    rows are missing, there will be at least a quarter more; they never become fewer.
    """
    rows, saved = 0.0, 0.0
    for done in range(rounds):
        since = done % pace
        if since == 0:
            saved = clients * (1 - (1 - share) ** done)
        known = clients * (1 - (1 - share) ** (done + 1))
        used = known + saved * (1 - (1 - share) ** (since + 1))
        if used > rows:
            rows = max(used, 1.25 * rows)
    return rows


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above that is there."""
    return next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())


def _machine_memory() -> float:
    """Return the bytes that this machine has, or a container's limit."""
    whole = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return whole if text == "max" else min(whole, float(text))
