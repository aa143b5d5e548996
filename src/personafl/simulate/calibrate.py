"""Which is faster for a problem on this machine, clients stacked or one by one: measured, where it is in doubt.

It is not in doubt on a GPU, where stacking is, nor for small networks, whose steps cost more to call than to compute.
A choice is kept in the run directory, so that a resumed run goes on with it, and in the user's cache, so that all seeds
of a comparison, and later runs of the same kind, have one. Where one thread computes, its processor seconds are
compared: they are the same whatever else the machine does, and one long pause decides nothing.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from personafl import __version__
from personafl.core import rng, tree
from personafl.core.algorithm import Problem
from personafl.core.batches import Data
from personafl.errors import StorageFailed
from personafl.simulate.clientside import received
from personafl.simulate.engine import Engine, Strategy, gather, largest_batch
from personafl.simulate.federation import Federation
from personafl.simulate.trainer import bound
from personafl.simulate.workers.local import one_thread
from personafl.storage.files import atomic_write, read_json, write_json

_SMALL = 2**16  # parameters up to which a network without convolutions or a frozen part is stacked unseen
_CLIENTS, _STEPS = 4, 2  # that are timed
_BUDGET = 0.15  # seconds for one strategy, after a first time that warms up
_KNOWN: dict[str, dict[str, float]] = {}  # in this process: key -> seconds a client and strategy

Clock = Callable[[], float]


def calibrated(
    federation: Federation, memory: int, file: Path, clock: Clock | None = None
) -> tuple[Federation, list[str]]:
    """Return the federation with the faster engines for its problems, and a line for each choice that was made.

    `file`, in the run directory, has the choices if they were made before.
    """
    if file.exists():
        strategies, notes = read_json(file)["strategies"], []
    else:
        choices = [_choice(federation, which, memory, clock) for which in range(len(federation.problems))]
        strategies, notes = [strategy for strategy, _ in choices], [why for _, why in choices if why]
        write_json(file, {"strategies": strategies, "why": notes})
    device = federation.data.device
    batch = largest_batch(federation.data, federation.learners.rule.phases)
    engines = tuple(
        engine
        if engine.strategy == strategy
        else Engine.fitted(problem, strategy, memory, device, batch=batch, bfloat16=engine.bfloat16)
        for engine, problem, strategy in zip(federation.engines, federation.problems, strategies, strict=True)
    )
    return dataclasses.replace(federation, engines=engines), list(dict.fromkeys(notes))


def in_doubt(problem: Problem, device: torch.device) -> bool:
    """Say whether only measuring tells how clients are trained faster."""
    nets = problem.net, problem.personal_net
    if device.type != "cpu" or problem.unstackable:
        return False
    return any(net.convolutional or net.constant or net.parameters > _SMALL for net in nets)


def _choice(federation: Federation, which: int, memory: int, clock: Clock | None) -> tuple[Strategy, str | None]:
    problem, device = federation.problems[which], federation.data.device
    if not in_doubt(problem, device) or not (federation.problem_of[federation.data.seen] == which).any():
        return federation.engines[which].strategy, None
    key = _key(federation, which)
    known = _KNOWN.get(key) or _cached().get(key)
    with one_thread() if federation.workers != 1 else contextlib.nullcontext():
        clock = clock or (time.thread_time if torch.get_num_threads() == 1 else time.perf_counter)
        seconds = known or measure(federation, which, memory, clock)
    _remember(key, seconds)
    stacked, alone = seconds["stacked"], seconds["sequential"]
    strategy: Strategy = "stacked" if stacked <= alone else "sequential"
    words = {"stacked": "stacked", "sequential": "one by one"}[strategy]
    times = f"a step takes {1e3 * stacked:.3g} ms a client stacked, {1e3 * alone:.3g} ms one by one"
    when = "measured before" if known else "measured"
    return strategy, f"clients are trained {words}: {times} ({when}; engine.strategy overrides)"


def measure(federation: Federation, which: int, memory: int, clock: Clock = time.perf_counter) -> dict[str, float]:
    """Return the seconds that a step of one client of a problem takes with each strategy."""
    who, problem, device = federation.learners, federation.problems[which], federation.data.device
    seen = federation.data.seen
    clients = seen[federation.problem_of[seen] == which][:_CLIENTS]
    down, again = received(federation.first_message())
    generators = (rng.generator(who.seed, "init", client) for client in clients.tolist())
    fresh = [who.cast(who.rule.init(problem, down, generator)) for generator in generators]
    data = _first_steps(gather(who.data, clients, who.rule.phases, who.seed, 0))
    steps = len(clients) * max(1, sum(batches.rows.shape[1] for batches in data.phases.values()))
    work = bound(who.rule.update, problem), again, tree.stack(fresh), data

    def seconds(strategy: Strategy) -> float:
        low, batch = federation.engines[which].bfloat16, largest_batch(who.data, who.rule.phases)
        engine = Engine.fitted(problem, strategy, memory, device, batch=batch, bfloat16=low)
        return _least(lambda: engine.train(*work), clock) / steps

    return {"stacked": seconds("stacked"), "sequential": seconds("sequential")}


def _first_steps(data: Data) -> Data:
    def first(value: Any) -> Any:
        return value[:, :_STEPS]

    phases = {
        name: batches._replace(rows=first(batches.rows), real=first(batches.real), key=first(batches.key))
        for name, batches in data.phases.items()
    }
    return data._replace(phases=phases)


def _least(work: Callable[[], object], clock: Clock) -> float:
    """Return the least time that work takes: the first one warms up, then as often as the budget allows."""
    work()
    best, spent = float("inf"), 0.0
    while spent < _BUDGET:
        began = clock()
        work()
        took = clock() - began
        best, spent = min(best, took), spent + took
    return best


def _key(federation: Federation, which: int) -> str:
    problem = federation.problems[which]
    facts = (
        {name: list(shape) for name, shape in problem.net.shapes.items()},
        {name: list(shape) for name, shape in problem.personal_net.shapes.items()},
        list(federation.data.x.shape[1:]),
        {name: str(work) for name, work in federation.algorithm.client.phases.items()},
        federation.algorithm.name,
        "bfloat16" if federation.engines[which].bfloat16 else str(federation.dtype),
        torch.get_num_threads() if federation.workers == 1 else 1,
        torch.__version__,
        __version__,
    )
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "personafl" / "engine.json"


def _cached() -> dict[str, dict[str, float]]:
    try:
        found = json.loads(_file().read_text())
        return {key: {name: float(value[name]) for name in ("stacked", "sequential")} for key, value in found.items()}
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):  # none, no home, or not ours
        return {}


def _remember(key: str, seconds: dict[str, float]) -> None:
    _KNOWN[key] = seconds
    cached = _cached()
    if key not in cached:
        with contextlib.suppress(OSError, RuntimeError, StorageFailed):  # a cache that cannot be kept is no failure
            _file().parent.mkdir(parents=True, exist_ok=True)
            atomic_write(_file(), json.dumps({**cached, key: seconds}, indent=1).encode(), alone=False)
