"""The store against a plain dict, with budgets so small that everything spills, is evicted and compacted."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from personafl.errors import BadInput
from personafl.runs.store import Store

CLIENTS = 7
SHAPES: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {  # kind of client -> its state
    "small": {"w": ((3,), torch.float32)},
    "large": {"model/w": ((5, 4), torch.float64), "model/b": ((), torch.float32), "steps": ((), torch.int64)},
    "odd": {"w": ((2, 0), torch.float32), "a#clients": ((2,), torch.int64), "flag": ((3,), torch.bool)},
}
LARGEST = 5 * 4 * 8 + 4 + 8


def kind_of(client: int) -> str:
    return list(SHAPES)[client % len(SHAPES)]


def state(client: int, value: int) -> dict[str, Tensor]:
    return {
        path: torch.full(shape, value + place).to(dtype)
        for place, (path, (shape, dtype)) in enumerate(SHAPES[kind_of(client)].items())
    }


def stacked(clients: list[int], value: int) -> dict[str, Tensor]:
    states = [state(client, value) for client in clients]
    return {path: torch.stack([entry[path] for entry in states]) for path in states[0]}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


class StoreMachine(RuleBasedStateMachine):
    """put, get, flush + commit + collect, and a crash: what is read is what a dict would say."""

    @initialize(budget=st.sampled_from([0, 1, LARGEST, 400, 2000]))
    def start(self, budget: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "states"
        self.budget = budget
        self.store = Store(self.path, budget)
        self.model: dict[int, int] = {}  # client -> value
        self.committed: tuple[dict[int, int], dict[int, int]] = ({}, {})  # index, values

    @rule(kind=st.sampled_from(list(SHAPES)), some=st.sets(st.integers(0, CLIENTS - 1)), value=st.integers(0, 100))
    def put(self, kind: str, some: set[int], value: int) -> None:
        clients = sorted(client for client in some if kind_of(client) == kind)
        if clients:
            self.store.put(clients, stacked(clients, value))
            self.model |= dict.fromkeys(clients, value)

    @rule(client=st.integers(0, CLIENTS - 1))
    def get(self, client: int) -> None:
        assert (client in self.store) == (client in self.model)
        if client in self.model:
            assert same(self.store.get(client), state(client, self.model[client]))

    @rule()
    def flush_only(self) -> None:
        self.store.flush()

    @rule()
    def checkpoint(self) -> None:
        index = self.store.flush()
        assert index.keys() == self.model.keys()
        self.committed = (index, dict(self.model))
        self.store.collect()
        referred = {f"segment-{number:08d}.safetensors" for number in index.values()}
        assert {path.name for path in self.path.iterdir()} == referred
        stored = sum(
            len(clients)
            for path in self.path.iterdir()
            for name, clients in safetensors.torch.load_file(path).items()
            if "/" not in name
        )
        assert stored <= 2 * len(index)  # compaction bounds the disk

    @rule(garbage=st.booleans())
    def crash(self, garbage: bool) -> None:
        if garbage:
            (self.path / "segment-00000999.safetensors.partial").write_bytes(b"half a segm")
            (self.path / "segment-00000998.safetensors").write_bytes(b"")
        self.store = Store(self.path, self.budget, self.committed[0])
        self.model = dict(self.committed[1])
        assert {int(p.stem.split("-")[1]) for p in self.path.iterdir()} == set(self.committed[0].values())
        assert len(self.store) == len(self.model)

    @precondition(lambda self: hasattr(self, "store"))
    @invariant()
    def memory_is_bounded(self) -> None:
        held = sum(leaf.numel() * leaf.element_size() for e in self.store._memory.values() for leaf in e.values())
        assert held == self.store._held <= self.budget
        assert self.store._unsaved <= self.store._memory.keys()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for client, value in self.model.items():
                assert same(self.store.get(client), state(client, value))
            self.folder.cleanup()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_reading_everybody_stays_within_the_budget(tmp_path: Path) -> None:
    """Scoring reads all clients: 100 states of 400 bytes through 1,000 bytes of memory."""
    store = Store(tmp_path / "states", 1000)
    for first in range(0, 100, 10):
        store.put(list(range(first, first + 10)), {"w": torch.arange(1000.0).reshape(10, 100) + first})
    for client in range(100):
        expected = torch.arange(100.0) + 100 * (client % 10) + client // 10 * 10
        assert torch.equal(store.get(client)["w"], expected)
        assert store._held <= 1000


def test_a_state_is_a_copy_in_plain_layout(tmp_path: Path) -> None:
    """In memory as on disk: changing what was put changes nothing, and strides do not depend on an eviction."""
    given = torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    kept = given.clone()
    for budget in (0, 2**20):
        store = Store(tmp_path / str(budget), budget)
        store.put([0, 1], {"w": given})
        given.zero_()
        assert torch.equal(store.get(1)["w"], kept[1])
        assert store.get(1)["w"].is_contiguous()
        given.copy_(kept)


def test_clients_never_seen_cost_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "states", 2**20)
    store.put([999_999], {"w": torch.ones(1, 4)})
    assert (len(store), store._held, 5 in store, 999_999 in store) == (1, 16, False, True)
    assert store.flush() == {999_999: 0}
    (segment,) = (tmp_path / "states").iterdir()
    assert segment.stat().st_size < 300


def test_only_the_committed_index_is_visible(tmp_path: Path) -> None:
    store = Store(tmp_path / "states", 2**20)
    store.put([1, 2], {"w": torch.tensor([[1.0], [2.0]])})
    index = store.flush()
    store.put([2, 3], {"w": torch.tensor([[20.0], [30.0]])})
    store.flush()  # durable, but no checkpoint names it
    again = Store(tmp_path / "states", 2**20, index)
    assert again.get(2)["w"].tolist() == [2.0]
    assert 3 not in again
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["segment-00000000.safetensors"]


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "noise", "foreign"])
@pytest.mark.parametrize("when", ["before", "after"])  # the segment's directory was read
def test_a_damaged_segment_is_named(tmp_path: Path, damage: str, when: str) -> None:
    store = Store(tmp_path / "states", 2**20)
    store.put([1, 2], {"w": torch.ones(2, 50)})
    store = Store(tmp_path / "states", 0, store.flush())
    segment = tmp_path / "states" / "segment-00000000.safetensors"
    if when == "after":
        store.get(1)
    if damage == "missing":
        segment.unlink()
    else:
        whole = segment.read_bytes()
        foreign = safetensors.torch.save({"0#clients": torch.tensor([7]), "0/w": torch.ones(1, 50)})
        segment.write_bytes({"empty": b"", "truncated": whole[:-7], "noise": b"\xff" * 90, "foreign": foreign}[damage])
    if (damage, when) == ("foreign", "after"):
        return  # a valid file swapped under a running process is beyond what a store can see
    with pytest.raises(BadInput, match=r"segment-00000000\.safetensors: the checkpoint"):
        store.get(2)
