"""What becomes of the personal models during a run, by their compact forms: how sparse, how large, which centers."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from personafl.core import wire
from personafl.data.federated import Clients
from personafl.models.modelfile import compacted
from personafl.runs.sizes import packed_models
from personafl.simulate.clientside import ClientSide

CLIENTS = 20  # of each kind of device; packing all of many would take longer than the rounds


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
        places = np.linspace(0, len(members) - 1, min(CLIENTS, len(members))).round().astype(np.int64)
        models = [_personal(side, client) for client in members[places].tolist()]
        centers = [wire.centers(parts[-1]) for parts in models]
        yield {
            "device": kind,
            "clients": len(models),
            "density": float(np.mean([wire.density(parts[-1]) for parts in models])),
            "parameters": float(np.mean([wire.parameters(parts) for parts in models])),
            "bytes": float(np.mean([wire.size(compacted(parts)) for parts in models])),
            "centers": {name: np.mean([each[name] for each in centers], axis=0).tolist() for name in centers[0]},
        }


def _personal(side: ClientSide, client: int) -> tuple[Any, ...]:
    return packed_models(side, None, client, int(side.homes[client]))["personal"]
