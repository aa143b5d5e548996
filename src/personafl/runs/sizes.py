"""How large the models are that come out of a run, as a device would store them."""

from dataclasses import dataclass

import numpy as np

from personafl.core import tree, wire
from personafl.core.algorithm import packed
from personafl.core.tree import Tree
from personafl.data.federated import Clients
from personafl.models.modelfile import compacted
from personafl.runs.scoring import stages
from personafl.simulate.clientside import ClientSide
from personafl.storage.store import Store


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
    message = side.broadcast(server)
    which = int(side.learners.problem_of[client])
    for name, states in stages(side, tuned, which, wire.dense(message), np.array([client])):
        parts = packed(side.learners.rule, side.learners.problems[which], message, tree.take(states, 0))
        models |= {name if key == "personal" else key: value for key, value in parts.items()}
    return models
