"""Results are handed on when the next is begun, and batches drawn ahead are those that would be drawn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from personafl.core.batches import Data
from personafl.simulate.simulator import Pipeline


def drawn(clients: Any, number: int) -> Data:
    return Data({}, torch.from_numpy(clients), torch.tensor(float(number)))


def test_each_result_waits_for_the_next_to_begin() -> None:
    log: list[str] = []

    def results() -> Iterator[int]:
        for number in range(3):
            log.append(f"begin {number}")
            yield number

    def following() -> Any:
        log.append("draw")
        return np.array([4, 2])

    ahead = Pipeline(drawn)
    log.extend(f"look at {number}" for number in ahead.handed_on(results(), 7, following))
    assert log == ["begin 0", "begin 1", "look at 0", "begin 2", "look at 1", "draw", "look at 2"]
    ready = ahead.take(np.array([4, 2]), 8)
    assert ready is not None
    assert ready.examples.tolist() == [4, 2]
    assert float(ready.round) == 8.0
    assert ahead.take(np.array([4, 2]), 8) is None  # once


def test_what_is_ready_for_others_is_not_used() -> None:
    for clients, number in (([4], 8), ([4, 2], 9), ([2, 4], 8)):
        ahead = Pipeline(drawn)
        assert list(ahead.handed_on(iter("ab"), 7, lambda: np.array([4, 2]))) == ["a", "b"]
        assert ahead.take(np.array(clients), number) is None


def test_nothing_is_drawn_if_nobody_follows_or_nothing_is_done() -> None:
    ahead = Pipeline(drawn)
    assert list(ahead.handed_on(iter("a"), 7, lambda: None)) == ["a"]
    assert list(ahead.handed_on(iter(""), 7, lambda: np.array([1]))) == []
    assert ahead.take(np.array([1]), 8) is None
