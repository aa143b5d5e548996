"""The models that come out of training: fine-tuning them, and scoring them on the clients' data."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core import tree
from personafl.core.algorithm import ClientRule, Problem, no_steps
from personafl.core.tree import Tree
from personafl.data.federated import Clients, Ragged
from personafl.evaluate.choice import Gains
from personafl.evaluate.score import PASS, Outcomes, Scores
from personafl.runs.trying import Message, TryOwn, TryShared, warn
from personafl.simulate.clientside import ClientSide
from personafl.storage.store import Store

T = TypeVar("T", Scores, Gains)


@dataclass(frozen=True)
class Scored:
    """Scores by (model, split), and by model the paired gains over the global model on validation data.

    Only clients that can use the global model and blends with it have gains: those with `chooses`.
    """

    scores: dict[tuple[str, str], Scores]
    gains: dict[str, Gains]
    chooses: NDArray[np.bool_]  # [clients]


def tuning(side: ClientSide, tuned: Store, clients: Clients, number: int) -> Iterator[Clients]:
    """Fine-tune clients after `number` rounds, from their states or as newcomers; yield chunks that are in `tuned`."""
    for group, states in side.personalize(clients, number):
        tuned.put(group, {path: leaf.contiguous().cpu() for path, leaf in tree.flatten(states).items()})
        yield group


def tune(side: ClientSide, tuned: Store, clients: Clients, number: int) -> None:
    """Fine-tune clients after `number` rounds, all of them."""
    for _ in tuning(side, tuned, clients, number):
        pass


def score(
    side: ClientSide, tuned: Store | None, clients: Clients, splits: Mapping[str, Ragged], blends: bool
) -> Scored:
    """Score what clients can use now: "global", "personal" (the state), "tuned" (fine-tuned from the state).

    The global model of a client is that of its own server.

    A client without a model in its state is as a newcomer: once it is in `tuned`, that is its personal model. With
    `blends`, mixtures of the global and the last personal model (tuned, if any) are scored too, as "blend 0.25" etc.,
    where both are of one architecture and in full precision.
    """
    who, rule = side.learners, side.learners.rule
    downs = {server: side.down(server) for server in np.unique(side.homes[clients]).tolist()}
    everyone = {server: clients[side.homes[clients] == server] for server in downs}
    shared, told = _tried_shared(side, downs, everyone, splits)
    scores: dict[tuple[str, str], list[tuple[Clients, Scores]]] = {}
    gains: dict[str, list[tuple[Clients, Gains]]] = {}
    twice = tuned is not None and bool((side.have_models(clients) & tuned.has(clients)).any())
    groups = [
        (which, server, group)
        for which, server, members in side.groups(_by_size(clients, splits))
        for group in _alike(side, tuned, members)
    ]

    @functools.cache
    def shape(which: int, server: int) -> Tree:
        return _tuned_shape(side, which, downs[server])

    def task(which: int, server: int, group: Clients) -> TryOwn:
        down = downs[server]
        known, ready = _stand(side, tuned, group)
        own = side.addressed(group)
        states = side.states_for(down, which, group, "none", own) if known or not ready else ()
        last = _tuned_states(side, tuned, shape(which, server), group) if ready and tuned is not None else ()
        outcomes = shared.get((server, "validation")) if blends and _can_choose(who.problems[which], rule) else None
        with_shared = None if outcomes is None else outcomes.of(_places(everyone[server], group))
        rows = {split: rows.among(group) for split, rows in splits.items()}
        return TryOwn(which, group, down, states, last, known, twice, rows, with_shared, own)

    for (_, _, group), tried in zip(groups, side.done(task(*group) for group in groups), strict=True):
        for key, found in tried.scores.items():
            scores.setdefault(key, []).append((group, found))
        for name, gained in tried.gains.items():
            gains.setdefault(name, []).append((group, gained))
        told.extend(tried.told)
    warn(told)
    for (server, split), outcomes in shared.items():
        scores.setdefault(("global", split), []).append((everyone[server], outcomes.scores()))
    joined = {key: _in_order(clients, parts) for key, parts in scores.items()}
    chooses = np.array([_can_choose(problem, rule) for problem in who.problems])[who.problem_of[clients]]
    return Scored(joined, {name: _in_order(clients, parts) for name, parts in gains.items()}, chooses)


def _tried_shared(
    side: ClientSide, downs: Mapping[int, Tree], everyone: Mapping[int, Clients], splits: Mapping[str, Ragged]
) -> tuple[dict[tuple[int, str], Outcomes], list[Message]]:
    """Return what became of the samples of each server's clients with its model, and what there is to warn of."""
    servers = [server for server, down in downs.items() if side.global_model(down) is not None]
    pieces = [(server, piece) for server in servers for piece in _pieces(everyone[server], splits)]
    tasks = (
        TryShared(piece, downs[server], {split: rows.among(piece) for split, rows in splits.items()})
        for server, piece in pieces
    )
    parts: dict[tuple[int, str], list[Outcomes]] = {}
    told: list[Message] = []
    for (server, _), tried in zip(pieces, side.done(tasks), strict=True):
        for split, outcomes in tried.outcomes.items():
            parts.setdefault((server, split), []).append(outcomes)
        told.extend(tried.told)
    return {key: Outcomes.joined(own) for key, own in parts.items()}, told


def _pieces(clients: Clients, splits: Mapping[str, Ragged]) -> Iterator[Clients]:
    """Cut clients into pieces that have about as many samples as one pass takes."""
    sizes = sum((rows.sizes_of(clients) for rows in splits.values()), np.zeros_like(clients))
    start, taken = 0, 0
    for place, size in enumerate(sizes.tolist()):
        if place > start and taken + size > PASS:
            yield clients[start:place]
            start, taken = place, 0
        taken += size
    yield clients[start:]


def _by_size(clients: Clients, splits: Mapping[str, Ragged]) -> Clients:
    """Return clients in the order of their samples: those of similar size are scored together, without padding.

    Who has most comes first, so that workers end together.
    """
    return clients[np.argsort(-sum(rows.sizes_of(clients) for rows in splits.values()), kind="stable")]


def _can_choose(problem: Problem, rule: ClientRule) -> bool:
    """Say whether a client's device takes the global model, and blends with it, which have all their bits."""
    return problem.personal_net is problem.net and rule.bits_of(problem) is None


def _alike(side: ClientSide, tuned: Store | None, clients: Clients) -> Iterator[Clients]:
    """Divide clients into those who have a model in their state or not, and are fine-tuned or not."""
    kinds = 2 * side.have_models(clients) + (tuned.has(clients) if tuned is not None else 0)
    for kind in np.unique(kinds):
        yield clients[kinds == kind]


def stages(side: ClientSide, tuned: Store | None, which: int, down: Tree, group: Clients) -> Iterator[tuple[str, Tree]]:
    """Yield what the models of clients that are alike are made from, stacked: states after the rounds, and fine-tuned.

    Who has no model after the rounds is a newcomer; fine-tuned, it has its "personal" one.
    """
    known, ready = _stand(side, tuned, group)
    if known or not ready:
        yield "personal", side.states(which, down, group, side.addressed(group))
    if ready and tuned is not None:
        yield "tuned" if known else "personal", _tuned_states(side, tuned, _tuned_shape(side, which, down), group)


def _stand(side: ClientSide, tuned: Store | None, group: Clients) -> tuple[bool, bool]:
    """Say whether clients that are alike have a model after the rounds, and whether they are fine-tuned."""
    first = int(group[0])
    return side.has_model(first), tuned is not None and first in tuned


def _tuned_states(side: ClientSide, tuned: Store, shape: Tree, group: Clients) -> Tree:
    """Return the states of fine-tuned clients, stacked."""
    device = side.learners.data.device
    return tree.unflatten(shape, {path: leaf.to(device) for path, leaf in tuned.take(group).items()})


def _tuned_shape(side: ClientSide, which: int, down: Tree) -> Tree:
    """Return a fine-tuned state, for its structure: what no steps of fine-tuning make of a fresh one."""
    who, rule = side.learners, side.learners.rule
    data = no_steps(who.problems[which], rule.tuning, torch.zeros((), dtype=who.dtype, device=who.data.device))
    return rule.personalize(who.problems[which], down, side.shape(which, down), data)


def _places(clients: Clients, members: Clients) -> Clients:
    """Return where in `clients` the members are."""
    order = np.argsort(clients)
    return order[np.searchsorted(clients, members, sorter=order)]


def _in_order(clients: Clients, pieces: list[tuple[Clients, T]]) -> T:
    """Join what groups of clients have, in the order of `clients`; those in no group count no samples."""
    rows = _places(clients, np.concatenate([members for members, _ in pieces]))
    kind = type(pieces[0][1])
    columns: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        parts = [getattr(part, field.name) for _, part in pieces]
        if isinstance(parts[0], Mapping):
            names = dict.fromkeys(parts[0])
            columns[field.name] = {name: _joined([part[name] for part in parts], rows, len(clients)) for name in names}
        else:
            columns[field.name] = _joined(parts, rows, len(clients))
    return kind(**columns)


def _joined(parts: list[NDArray[Any]], rows: Clients, clients: int) -> NDArray[Any]:
    """Put values of groups of clients in their places; elsewhere are NaN, or 0 where they are counts."""
    values = np.concatenate(parts)
    column = np.full(clients, np.nan if values.dtype.kind == "f" else 0, dtype=values.dtype)
    column[rows] = values
    return column
