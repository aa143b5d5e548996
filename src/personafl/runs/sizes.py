"""What the models of a run are in their compact forms: how large, as a device would store them, and how sparse."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from personafl.core import tree, wire
from personafl.core.algorithm import packed
from personafl.core.tree import Tree
from personafl.data.federated import Clients
from personafl.models.modelfile import compacted
from personafl.runs.scoring import stages
from personafl.simulate.clientside import ClientSide
from personafl.storage.store import Store

OBSERVED = 20  # clients of each kind of device; packing all of many would take longer than the rounds


@dataclass(frozen=True)
class Size:
    """Mean over clients: numbers in the model's parts, and bytes of its tensors in the smallest form."""

    parameters: int
    bytes: int


def measure(side: ClientSide, tuned: Store | None, clients: Clients) -> dict[str, Size]:
    """Return the sizes of the models of clients; where a rule has no compact form, one client stands for its kind."""
    alike = side.learners.rule.packed is None
    kinds = side.learners.problem_of[clients]
    found: dict[str, list[tuple[int, int, int]]] = {}
    for which in np.unique(kinds):
        members = clients[kinds == which]
        for client in map(int, members[:1] if alike else members):
            models = packed_models(side, tuned, client, int(side.homes[client]))
            if alike and "personal" in models:  # it may be a newcomer, which has no model that is tuned again
                models.setdefault("tuned", models["personal"])
            for name, parts in models.items():
                standing = len(members) if alike else 1
                found.setdefault(name, []).append((wire.parameters(parts), wire.size(compacted(parts)), standing))
    sizes = {}
    for name, values in found.items():
        parameters, size, standing = np.array(values, dtype=np.float64).T
        means = (round(float(np.average(column, weights=standing))) for column in (parameters, size))
        sizes[name] = Size(*means)
    return sizes


def packed_models(
    side: ClientSide, tuned: Store | None, client: int, server: int | None
) -> dict[str, tuple[Tree, ...]]:
    """Return a client's models in compact forms by the names that scores have: global, personal, tuned.

    They are made from what a server sends; None: from the mean of all servers.
    """
    models: dict[str, tuple[Tree, ...]] = {}
    message = side.message_to(client, server)
    which = int(side.learners.problem_of[client])
    for name, states in stages(side, tuned, which, wire.dense(message), np.array([client])):
        parts = packed(side.learners.rule, side.learners.problems[which], message, tree.take(states, 0))
        models |= {name if key == "personal" else key: value for key, value in parts.items()}
    return models


def observe(side: ClientSide, clients: Clients) -> Iterator[dict[str, Any]]:
    """Yield, per kind of device, means over some clients that have models; nothing if their rule has no compact form.

    `density` is the share of the entries of a client's own part that are not 0, `centers` are those of each quantized
    weight, `parameters` and `bytes` are those of the whole personal model.
    """
    if side.learners.rule.packed is None:
        return
    known = np.array([client for client in map(int, clients) if side.has_model(client)], dtype=np.int64)
    kinds = side.learners.problem_of[known]
    for kind in np.unique(kinds).tolist():
        members = known[kinds == kind]
        places = np.linspace(0, len(members) - 1, min(OBSERVED, len(members))).round().astype(np.int64)
        chosen = members[places].tolist()
        models = [packed_models(side, None, client, int(side.homes[client]))["personal"] for client in chosen]
        centers = [wire.centers(parts[-1]) for parts in models]
        yield {
            "device": kind,
            "clients": len(models),
            "density": float(np.mean([wire.density(parts[-1]) for parts in models])),
            "parameters": float(np.mean([wire.parameters(parts) for parts in models])),
            "bytes": float(np.mean([wire.size(compacted(parts)) for parts in models])),
            "centers": {name: np.mean([each[name] for each in centers], axis=0).tolist() for name in centers[0]},
        }
