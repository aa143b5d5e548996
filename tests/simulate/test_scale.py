"""What a registered client costs that is never sampled: bytes, counted, with 40,000 of them."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from personafl import api
from personafl.data.federated import FederatedData, Numbered, Ragged, make_federated
from personafl.runs.listener import Progress

FEW, MANY = 1000, 40_000
RECIPE = {
    "rounds": 5,
    "evaluation": {"every": 0},
    "method": {"name": "fedalt"},
    "model": {"name": "mlp", "hidden": [8], "personal": "output"},
    "training": {"batch": 1},
    "federation": {"cohort": 10},
    "engine": {"checkpoint_seconds": 0.0},
}


def registered(clients: int) -> FederatedData:
    """Clients that share eight samples."""
    rows = Ragged(np.arange(clients) % 8, np.arange(clients + 1))
    return make_federated(
        name="pool",
        x=torch.randn(8, 4, generator=torch.Generator().manual_seed(0)),
        y=torch.arange(8) % 2,
        classes=2,
        train=rows,
        validation=Ragged.empty(clients),
        test=rows,
        seen=np.arange(clients),
        unseen=np.arange(0),
        client_names=Numbered(clients),
        label_names=("0", "1"),
    )


class Enough(Exception):
    """Ends a run before everyone is scored."""


def cost(clients: int, out: Path) -> tuple[int, int, int]:
    """Return bytes besides the data: of the start at most, kept after some rounds, and of a round at most besides."""
    data, found = registered(clients), []

    def listener(progress: object) -> None:
        if not isinstance(progress, Progress):
            return
        gc.collect()  # what is in cycles is not kept
        found.append(tracemalloc.get_traced_memory())
        tracemalloc.reset_peak()
        if len(found) == 4:
            raise Enough

    tracemalloc.start()
    try:
        api.run(RECIPE, data=data, out=out, listener=listener)
    except Enough:
        pass
    finally:
        tracemalloc.stop()
    start, *rounds = found
    return start[1], rounds[-1][0], max(peak - before for (before, _), (_, peak) in zip(found, rounds, strict=False))


@pytest.mark.system
def test_a_registered_client_costs_bytes(tmp_path: Path) -> None:
    """Kept: a problem, a home and a place in the store's table. In a round: a draw and the store's index."""
    api.run(RECIPE, data=registered(20), out=tmp_path / "first")  # so that everything is imported
    few, many = cost(FEW, tmp_path / "few"), cost(MANY, tmp_path / "many")
    start, kept, in_a_round = ((m - f) / (MANY - FEW) for m, f in zip(many, few, strict=True))
    assert start < 200
    assert kept < 40
    assert in_a_round < 40
