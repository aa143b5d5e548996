"""The models that come out of training: fine-tuning them, and scoring them on the clients' data."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from personafl.core import tree
from personafl.core.algorithm import ClientRule, Problem, no_steps
from personafl.core.tree import Params, Tree
from personafl.data.federated import Clients, Ragged
from personafl.evaluate.choice import Gains
from personafl.evaluate.score import Scores, try_personal, try_shared
from personafl.simulate.clientside import ClientSide
from personafl.storage.store import Store

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


def tune(side: ClientSide, tuned: Store, clients: Clients, number: int) -> None:
    """Fine-tune clients after `number` rounds, from their states or as newcomers, and keep the result in `tuned`."""
    for group, states in side.personalize(clients, number):
        tuned.put(group, {path: leaf.contiguous().cpu() for path, leaf in tree.flatten(states).items()})


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
    globals_ = {server: side.global_model(down) for server, down in downs.items()}
    everyone = {server: clients[side.homes[clients] == server] for server in downs}
    shared = {
        (server, split): try_shared(who.problems[0], params, who.data, rows, everyone[server])
        for server, params in globals_.items()
        if params is not None
        for split, rows in splits.items()
    }
    scores: dict[tuple[str, str], list[tuple[Clients, Scores]]] = {}
    gains: dict[str, list[tuple[Clients, Gains]]] = {}
    twice = tuned is not None and bool((side.have_models(clients) & tuned.has(clients)).any())
    for which, server, members in side.groups(_by_size(clients, splits)):
        problem, down = who.problems[which], downs[server]
        base = globals_[server] if blends and _can_choose(problem, rule) else None
        for group in _alike(side, tuned, members):
            for name, params in _candidates(side, tuned, which, down, group, base, twice):
                for split, rows in splits.items():
                    if split == "train" and name.startswith("blend"):
                        continue  # nobody asks
                    own = try_personal(problem, params, who.data, rows, group)
                    scores.setdefault((name, split), []).append((group, own.scores()))
                    if base is not None and split == "validation":
                        other = shared[server, split].of(_places(everyone[server], group))
                        gains.setdefault(name, []).append((group, own.gains_over(other)))
    for (server, split), outcomes in shared.items():
        scores.setdefault(("global", split), []).append((everyone[server], outcomes.scores()))
    joined = {key: _in_order(clients, parts) for key, parts in scores.items()}
    chooses = np.array([_can_choose(problem, rule) for problem in who.problems])[who.problem_of[clients]]
    return Scored(joined, {name: _in_order(clients, parts) for name, parts in gains.items()}, chooses)


def _by_size(clients: Clients, splits: Mapping[str, Ragged]) -> Clients:
    """Return clients in the order of their samples: those of similar size are scored together, without padding."""
    return clients[np.argsort(sum(rows.sizes_of(clients) for rows in splits.values()), kind="stable")]


def _candidates(
    side: ClientSide, tuned: Store | None, which: int, down: Tree, group: Clients, base: Params | None, twice: bool
) -> Iterator[tuple[str, Params]]:
    """Yield the stacked models of clients that are alike, one kind after the other: they may be large."""
    stacked = {name: _personal(side, which, down, states) for name, states in stages(side, tuned, which, down, group)}
    models = {name: params for name, params in stacked.items() if params is not None}
    if twice and "tuned" not in models:  # a newcomer, among clients that have both
        models["tuned"] = models["personal"]
    yield from models.items()
    last = models.get("tuned", models.get("personal"))
    if base is not None and last is not None:
        for share in SHARES:
            yield f"blend {share}", _blend(base, last, share)


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
    first = int(group[0])
    known, ready = side.has_model(first), tuned is not None and first in tuned
    if known or not ready:
        yield "personal", side.states(which, down, group)
    if ready and tuned is not None:
        device = side.learners.data.device
        stacked = {path: leaf.to(device) for path, leaf in tuned.take(group).items()}
        yield "tuned" if known else "personal", tree.unflatten(_tuned_shape(side, which, down), stacked)


def _personal(side: ClientSide, which: int, down: Tree, states: Tree) -> Params | None:
    """Return the personal models of stacked states, if they have any."""
    rule, problem = side.learners.rule, side.learners.problems[which]
    if not tree.leaves(states) or "personal" not in rule.models(problem, down, tree.take(states, 0)):
        return None
    own: Params = vmap(lambda state: rule.models(problem, down, state)["personal"])(states)
    return own


def _tuned_shape(side: ClientSide, which: int, down: Tree) -> Tree:
    """Return a fine-tuned state, for its structure: what no steps of fine-tuning make of a fresh one."""
    who, rule = side.learners, side.learners.rule
    data = no_steps(who.problems[which], rule.tuning, torch.zeros((), dtype=who.dtype, device=who.data.device))
    return rule.personalize(who.problems[which], down, side.shape(which, down), data)


def _blend(shared: Params, stacked: Params, share: float) -> Params:
    """Return mixtures of the shared and each own model; what all clients have in common stays one tensor, expanded."""

    def mixed(name: str, own: Tensor) -> Tensor:
        if own.stride(0):
            return torch.lerp(shared[name].expand_as(own), own, share)
        return torch.lerp(shared[name], own[0], share).expand_as(own)

    return {name: mixed(name, own) for name, own in stacked.items()}


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
