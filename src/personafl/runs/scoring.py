"""The models that come out of a simulation: fine-tuning them, and scoring them on the clients' data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.func import vmap

from personafl.core import tree
from personafl.core.algorithm import ClientRule, Problem
from personafl.core.batches import Data
from personafl.core.tree import Params, Tree
from personafl.data.federated import Ragged
from personafl.evaluate.choice import Gains
from personafl.evaluate.score import Scores, paired_gains, score_personal, score_shared
from personafl.runs.engine import gather
from personafl.runs.simulator import Simulation, bound
from personafl.runs.store import Store

__all__ = ["SHARES", "Scored", "score", "tune", "tuned_states"]

Clients = NDArray[np.int64]
T = TypeVar("T", Scores, Gains)
SHARES = (0.25, 0.5, 0.75)  # of the personal model, in the blends that a device may choose


@dataclass(frozen=True)
class Scored:
    """Scores by (model, split), and by model the paired gains over the global model on validation data.

    Only clients that can use the global model and blends with it have gains: those with `chooses`.
    """

    scores: dict[tuple[str, str], Scores]
    gains: dict[str, Gains]
    chooses: NDArray[np.bool_]  # [clients]


def tune(simulation: Simulation, tuned: Store, clients: Clients, number: int) -> None:
    """Fine-tune clients after `number` rounds, from their states or as newcomers, and keep the result in `tuned`."""
    fed, rule = simulation.federation, simulation.federation.algorithm.client
    for which, server, group in simulation.groups(clients):
        down = simulation.down(server)
        data = gather(fed.data, group, rule.tuning, fed.seed, number)
        states = simulation.states(which, down, group)
        states = fed.engines[which].train(bound(rule.personalize, fed.problems[which]), down, states, data)
        simulation.check(f"after round {number}: fine-tuning", group, states)
        flat = {path: leaf.contiguous().cpu() for path, leaf in tree.flatten(states).items()}
        tuned.put([int(client) for client in group], flat)


def score(
    simulation: Simulation, tuned: Store | None, clients: Clients, splits: Mapping[str, Ragged], blends: bool
) -> Scored:
    """Score what clients can use now: "global", "personal" (the state), "tuned" (fine-tuned from the state).

    The global model of a client is that of its own server.

    A client without a model in its state is as a newcomer: once it is in `tuned`, that is its personal model. With
    `blends`, mixtures of the global and the last personal model (tuned, if any) are scored too, as "blend 0.25" etc.,
    where both are of one architecture and in full precision.
    """
    fed, rule = simulation.federation, simulation.federation.algorithm.client
    downs = {server: simulation.down(server) for server in np.unique(simulation.homes[clients]).tolist()}
    globals_ = {server: _global(simulation, down) for server, down in downs.items()}
    scores: dict[tuple[str, str], list[tuple[Clients, Scores]]] = {}
    gains: dict[str, list[tuple[Clients, Gains]]] = {}
    twice = tuned is not None and any(simulation.has_model(c) and c in tuned for c in map(int, clients))
    for which, server, members in simulation.groups(clients):
        problem, down, shared = fed.problems[which], downs[server], globals_[server]
        for group in _alike(simulation, tuned, members):
            models = dict(_models(simulation, tuned, which, down, group))
            if twice and "tuned" not in models:  # a newcomer, among clients that have both
                models["tuned"] = models["personal"]
            last = models.get("tuned", models.get("personal"))
            base = shared if blends and _can_choose(problem, rule) else None
            if base is not None and last is not None:
                models |= {f"blend {share}": _blend(base, last, share) for share in SHARES}
            for name, params in models.items():
                for split, rows in splits.items():
                    result = score_personal(problem, params, fed.data, rows, group)
                    scores.setdefault((name, split), []).append((group, result))
                if base is not None:
                    pair = paired_gains(problem, base, params, fed.data, splits["validation"], group)
                    gains.setdefault(name, []).append((group, pair))
    joined = {key: _in_order(clients, parts) for key, parts in scores.items()}
    for split, rows in splits.items():
        parts = [
            (members, score_shared(fed.problems[0], shared, fed.data, rows, members))
            for server, shared in globals_.items()
            if shared is not None and len(members := clients[simulation.homes[clients] == server])
        ]
        if parts:
            joined["global", split] = _in_order(clients, parts)
    chooses = np.array([_can_choose(fed.problems[which], rule) for which in fed.problem_of[clients]], dtype=np.bool_)
    return Scored(joined, {name: _in_order(clients, parts) for name, parts in gains.items()}, chooses)


def _global(simulation: Simulation, down: Tree) -> Params | None:
    """Return the model that the clients of a server share, if any."""
    fed = simulation.federation
    return fed.algorithm.client.models(fed.problems[0], down, simulation.shape(0, down)).get("global")


def _can_choose(problem: Problem, rule: ClientRule) -> bool:
    """Say whether a client's device takes the global model, and blends with it, which have all their bits."""
    quantized = problem.bits is not None or getattr(rule, "bits", None) is not None
    return problem.personal_net is problem.net and not quantized


def _alike(simulation: Simulation, tuned: Store | None, clients: Clients) -> Iterator[Clients]:
    """Divide clients into those who have a model in their state or not, and are fine-tuned or not."""
    kinds = np.array([2 * simulation.has_model(c) + (tuned is not None and c in tuned) for c in map(int, clients)])
    for kind in np.unique(kinds):
        yield clients[kinds == kind]


def _models(
    simulation: Simulation, tuned: Store | None, which: int, down: Tree, group: Clients
) -> Iterator[tuple[str, Params]]:
    """Yield the stacked personal models of clients that are alike."""
    problem, first = simulation.federation.problems[which], int(group[0])
    known = simulation.has_model(first)
    ready = tuned is not None and first in tuned
    if known or not ready:
        yield from _personal(simulation, problem, down, simulation.states(which, down, group), "personal")
    if ready and tuned is not None:
        states = tuned_states(simulation, tuned, which, down, group)
        yield from _personal(simulation, problem, down, states, "tuned" if known else "personal")


def _personal(
    simulation: Simulation, problem: Problem, down: Tree, states: Tree, name: str
) -> Iterator[tuple[str, Params]]:
    """Yield the personal models of stacked states, if they have any."""
    rule = simulation.federation.algorithm.client
    if tree.leaves(states) and "personal" in rule.models(problem, down, tree.take(states, 0)):
        own: Params = vmap(lambda state: rule.models(problem, down, state)["personal"])(states)
        yield name, own


def tuned_states(simulation: Simulation, tuned: Store, which: int, down: Tree, clients: Clients) -> Tree:
    """Return the stacked states of clients after fine-tuning."""
    entries = [tuned.get(int(client)) for client in clients]
    device = simulation.federation.data.x.device
    stacked = {path: torch.stack([entry[path] for entry in entries]).to(device) for path in entries[0]}
    return tree.unflatten(_tuned_shape(simulation, which, down), stacked)


def _tuned_shape(simulation: Simulation, which: int, down: Tree) -> Tree:
    """Return a fine-tuned state, for its structure: what no steps of fine-tuning make of a fresh one."""
    fed, rule = simulation.federation, simulation.federation.algorithm.client
    stacked = gather(fed.data, fed.data.seen[:1], rule.tuning, fed.seed, 0)
    none = {
        name: batches._replace(rows=batches.rows[0, :0], real=batches.real[0, :0], key=batches.key[0, :0])
        for name, batches in stacked.phases.items()
    }
    data = Data(none, stacked.examples[0], stacked.round)
    return rule.personalize(fed.problems[which], down, simulation.shape(which, down), data)


def _blend(shared: Params, stacked: Params, share: float) -> Params:
    return {name: torch.lerp(shared[name].expand_as(own), own, share) for name, own in stacked.items()}


def _in_order(clients: Clients, pieces: list[tuple[Clients, T]]) -> T:
    """Join what groups of clients have, in the order of `clients`; those in no group count no samples."""
    place = {int(client): row for row, client in enumerate(clients)}
    rows = [place[int(client)] for members, _ in pieces for client in members]
    kind = type(pieces[0][1])
    columns = {}
    for field in dataclasses.fields(kind):
        values = np.concatenate([getattr(part, field.name) for _, part in pieces])
        columns[field.name] = np.full(len(clients), np.nan if values.dtype.kind == "f" else 0, dtype=values.dtype)
        columns[field.name][rows] = values
    return kind(**columns)
