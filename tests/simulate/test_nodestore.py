"""States on nodes: read as if they were at home, and brought there once."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from personafl.simulate.workers.nodestore import HOME, NodeStore, StatesLost
from personafl.storage.slab import Clients, Entry
from personafl.storage.store import Store

CLIENTS = 6
some = st.sets(st.integers(0, CLIENTS - 1), min_size=1).map(lambda found: np.array(sorted(found)))


def stacked(values: list[float]) -> Entry:
    return {"w": torch.tensor(values).reshape(-1, 1).repeat(1, 3), "n": torch.tensor(values, dtype=torch.float64)}


class Away(RuleBasedStateMachine):
    """Two nodes that train, a home where states are read, replaced and flushed; against a dict."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.nodes = [Store(self.path / f"node-{number}", 2**20) for number in range(2)]
        self.store = NodeStore(Store(self.path / "home", 2**20), CLIENTS, self)
        self.later = [Store(self.path / f"later-{number}", 2**20) for number in range(2)]
        self.model: dict[int, float] = {}
        self.under_way: dict[int, float] = {}
        self.fetched: set[int] = set()  # since they changed
        self.clock = 0.0

    def fetch(self, node: int, clients: Clients, later: bool) -> Iterator[tuple[Clients, Entry]]:
        assert later or not self.fetched & set(clients.tolist())
        self.fetched |= set() if later else set(clients.tolist())
        store = (self.later if later else self.nodes)[node]
        for piece in store.pieces(clients, 60):  # two a piece
            yield piece, store.take(piece)

    def arrive(self, node: int, clients: Clients) -> None:
        self.nodes[node].put(clients, self.later[node].take(clients))

    def changed(self, clients: Clients) -> Entry:
        values = [self.clock + client for client in clients.tolist()]
        self.clock += 10
        self.model |= dict(zip(clients.tolist(), values, strict=True))
        self.fetched -= set(clients.tolist())
        return stacked(values)

    @rule(clients=some, node=st.integers(0, 1))
    def train(self, clients: Clients, node: int) -> None:
        self.nodes[node].put(clients, self.changed(clients))
        self.store.left(clients, node, later=False)

    @rule(clients=some, node=st.integers(0, 1))
    def start(self, clients: Clients, node: int) -> None:
        values = [self.clock + client for client in clients.tolist()]
        self.clock += 10
        self.under_way |= dict(zip(clients.tolist(), values, strict=True))
        self.later[node].put(clients, stacked(values))
        self.store.left(clients, node, later=True)

    @rule(clients=some)
    def come(self, clients: Clients) -> None:
        arrived = clients[self.store.has_later(clients)]
        self.store.arrive(arrived)
        self.fetched -= set(arrived.tolist())
        self.model |= {client: self.under_way.pop(client) for client in arrived.tolist()}

    @rule(clients=some)
    def recall(self, clients: Clients) -> None:
        asked = clients[self.store.has_later(clients)]
        found = {c: v for piece, entry in self.store.recall(asked) for c, v in zip(piece, entry["n"], strict=True)}
        assert found == {client: self.under_way.pop(client) for client in asked.tolist()}

    @rule(clients=some)
    def put(self, clients: Clients) -> None:
        self.store.put(clients, self.changed(clients))

    @rule(clients=some)
    def take(self, clients: Clients) -> None:
        known = clients[self.store.has(clients)]
        if len(known):
            found = self.store.take(known)
            expected = stacked([self.model[client] for client in known.tolist()])
            assert all(torch.equal(found[path], expected[path]) for path in expected)

    @rule()
    def reopen(self) -> None:
        """Go on from a checkpoint, without the nodes."""
        index = self.store.flush()
        self.store.collect()
        self.under_way = {}
        self.store = NodeStore(Store(self.path / "home", 2**20, index), CLIENTS, self)

    @rule()
    def end(self) -> None:
        """Without anything away the end of the nodes loses nothing."""
        self.recall(np.arange(CLIENTS))
        self.store.flush()
        self.store.end()
        assert (self.store.places(np.arange(CLIENTS)) == HOME).all()

    @invariant()
    def knows(self) -> None:
        later = self.store.has_later(np.arange(CLIENTS))
        assert later.tolist() == [client in self.under_way for client in range(CLIENTS)]
        assert self.store.clients.tolist() == sorted(self.model)
        assert len(self.store) == len(self.model)
        assert self.store.has(np.arange(CLIENTS)).tolist() == [client in self.model for client in range(CLIENTS)]

    def teardown(self) -> None:
        self.folder.cleanup()


TestAway = Away.TestCase


def test_states_that_ended_with_their_node_are_not_taken_for_old_ones(tmp_path: Path) -> None:
    home = Store(tmp_path / "home", 2**20)
    home.put([0, 1, 2], stacked([1.0, 2.0, 3.0]))
    store = NodeStore(home, 3, Mock())
    store.left(np.array([1]), 0, later=False)
    store.left(np.array([2]), 0, later=True)
    store.end()
    assert store.take(np.array([0, 2]))["n"].tolist() == [1, 3]
    later = functools.partial(store.arrive, np.array([2]))
    for read in (store.flush, lambda: store.get(1), lambda: store.places(np.array([0, 1])), later):
        with pytest.raises(StatesLost, match=r"the newest states of 1 clients .*the last checkpoint is kept"):
            read()
    store.put([1], stacked([4.0]))
    assert store.get(1)["n"] == 4


def test_clients_whose_states_are_on_nodes_are_not_read_ahead_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, asked = Store(tmp_path / "home", 0), list[int]()
    monkeypatch.setattr(home, "prefetch", lambda clients: asked.extend(clients.tolist()))
    store = NodeStore(home, 3, Mock())
    store.left(np.array([1]), 0, later=False)
    store.prefetch(np.arange(3))
    assert asked == [0, 2]
