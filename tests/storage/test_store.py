"""The store against a plain dict, with crashes; its memory; and what it says about damaged files."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray
from torch import Tensor

from personafl.errors import BadInput
from personafl.storage.store import Store
from waiting import until

CLIENTS = 7
SHAPES: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {  # kind of client -> its state
    "small": {"w": ((3,), torch.float32)},
    "large": {"model/w": ((5, 4), torch.float64), "model/b": ((), torch.float32), "steps": ((), torch.int64)},
    "odd": {"w": ((2, 0), torch.float32), "a#clients": ((2,), torch.int64), "flag": ((3,), torch.bool)},
}


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

    @initialize(budget=st.sampled_from([0, 20_000]))
    def start(self, budget: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "states"
        self.budget = budget
        self.store = Store(self.path, budget)
        self.model: dict[int, int] = {}  # client -> value
        self.committed: tuple[int, dict[int, int]] = (0, {})  # index, values of the clients

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

    @rule(kind=st.sampled_from(list(SHAPES)), some=st.sets(st.integers(0, CLIENTS - 1)))
    def take(self, kind: str, some: set[int]) -> None:
        clients = [client for client in sorted(some & self.model.keys()) if kind_of(client) == kind]
        if clients:
            states = [state(client, self.model[client]) for client in clients]
            expected = {path: torch.stack([entry[path] for entry in states]) for path in states[0]}
            assert same(self.store.take(np.array(clients)), expected)

    @rule(some=st.sets(st.integers(0, CLIENTS + 2)))
    def prefetch(self, some: set[int]) -> None:
        self.store.prefetch(np.array(sorted(some), dtype=np.int64))

    @rule()
    def flush_only(self) -> None:
        self.store.flush()

    @rule(client=st.none() | st.integers(0, CLIENTS - 1))
    def checkpoint(self, client: int | None) -> None:
        index = self.store.flush()
        assert self.store.clients.tolist() == sorted(self.model)
        self.committed = (index, dict(self.model))
        if client is not None:
            self.put(kind_of(client), {client}, 7)  # before the checkpoint is committed
        self.store.collect()
        slabs = {f"slab-{number}" for number in self.store._slabs}
        indices = {f"index-{index:06d}.safetensors"} if index else set()
        assert {path.name for path in self.path.iterdir()} == slabs | indices
        assert self.slots() <= max(CLIENTS, 2 * len(self.model)) * 5 / 4 + 1

    def slots(self) -> int:
        return sum(len(slab) for slab in self.store._slabs.values())

    @rule(garbage=st.booleans())
    def crash(self, garbage: bool) -> None:
        """Whatever is not of the committed index may be on the disk in part, or not at all."""
        index, model = self.committed
        if garbage:
            (self.path / f"index-{index + 1:06d}.safetensors.partial").write_bytes(b"half an ind")
            (self.path / f"index-{index + 1:06d}.safetensors").write_bytes(b"")
            (self.path / "slab-9").write_bytes(b"")
        self.store = Store(self.path, self.budget, index)
        for slab in self.store._slabs.values():
            slab._rows[slab.free] = 255
        self.model = dict(model)
        assert len(self.store) == len(self.model)
        assert self.slots() == sum(len(slab.free) for slab in self.store._slabs.values()) + len(self.model)

    @precondition(lambda self: hasattr(self, "store"))
    @invariant()
    def a_row_has_one_owner(self) -> None:
        places = self.store._places
        for which, slab in self.store._slabs.items():
            waiting = [old["row"][old["slab"] == which] for old in self.store._replaced + self.store._garbage]
            taken = places["row"][places["slab"] == which]
            rows = np.concatenate([taken, slab.free, *waiting])
            assert sorted(rows) == list(range(len(slab)))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for client, value in self.model.items():
                assert same(self.store.get(client), state(client, value))
            self.folder.cleanup()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_cohort_in_any_order(tmp_path: Path) -> None:
    store = Store(tmp_path / "states", 2**20)
    values = torch.arange(20_000.0).reshape(200, 100)
    for first in range(0, 200, 20):
        store.put(range(first, first + 20), {"w": values[first : first + 20]})
    asked = np.array([190, 3, 7, 5, 199, 4])
    assert torch.equal(store.take(asked)["w"], values[asked])
    values[asked] *= 2
    store.flush()
    store.put(asked, {"w": values[asked]})
    assert torch.equal(store.take(np.arange(200))["w"], values)


def test_what_a_checkpoint_refers_to_is_not_written_to(tmp_path: Path) -> None:
    """Rows of an index stay as they are until the next one is committed; others are written over in place."""
    store = Store(tmp_path / "states", 2**20)
    for value in range(20):
        store.put([1, 2], stacked_plain([value, value]))
    (slab,) = store._slabs.values()
    assert len(slab) == 2
    store.flush()
    before = (tmp_path / "states" / "slab-1").read_bytes()
    for value in range(20):
        store.put([2], stacked_plain([100 + value]))
    assert (tmp_path / "states" / "slab-1").read_bytes()[: len(before)] == before
    assert len(slab) == 3


def stacked_plain(values: list[int]) -> dict[str, Tensor]:
    return {"w": torch.tensor(values, dtype=torch.float32).reshape(-1, 1)}


def test_states_are_durable_before_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, done = Store(tmp_path / "states", 2**20), []
    store.put([1], stacked_plain([1]))
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append(str(new)), replace(old, new)))
    store.flush()
    assert [Path(path).name for path in done] == [
        "slab-1",
        "index-000001.safetensors.partial",
        "index-000001.safetensors",
        "states",
    ]
    assert store.flush() == 1
    assert len(done) == 4  # nothing changed


def test_a_client_with_another_layout(tmp_path: Path) -> None:
    store = Store(tmp_path / "states", 2**20)
    store.put([0, 3], stacked([0, 3], 1))
    index = store.flush()
    other = {"w": torch.ones(1, 9)}
    store.put([3], other)
    assert same(store.take(np.array([3])), other)
    assert same(store.get(0), state(0, 1))
    assert same(Store(tmp_path / "states", 0, index).get(3), state(3, 1))


def test_pieces_are_of_one_layout_and_of_so_many_bytes(tmp_path: Path) -> None:
    """A row of float32 [4] has 8 + 16 bytes, one of [100] 8 + 400: of which not even one fits."""
    store = Store(tmp_path / "states", 2**20)
    store.put([0, 2, 4, 6, 8], {"w": torch.zeros(5, 4)})
    store.put([1, 3], {"w": torch.zeros(2, 100)})
    pieces = store.pieces(np.array([8, 6, 4, 3, 2, 1]), 71)
    assert [piece.tolist() for piece in pieces] == [[8, 6], [4, 2], [3], [1]]


def cached(path: Path) -> NDArray[np.bool_]:
    """Say which pages of a file are in the system's cache."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        pages = np.zeros(-(-len(memory) // mmap.PAGESIZE), dtype=np.uint8)
        begin = np.frombuffer(memory, np.uint8).ctypes.data
        assert ctypes.CDLL(None).mincore(*map(ctypes.c_size_t, (begin, len(memory), pages.ctypes.data))) == 0
        return (pages & 1) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is in its cache")
def test_reading_ahead(tmp_path: Path) -> None:
    """States of two layouts that are on disk alone are in memory soon after they were asked for; others are not."""
    store, many, asked = Store(tmp_path / "states", 0), np.arange(400), [3, 50, 399]
    size = 8 + 4 * 4096
    store.put(many, {"w": torch.randn(400, 4096)})
    store.put(many + 1000, {"v": torch.randn(400, 4096)})
    store.flush()
    slabs = [slab.path for slab in store._slabs.values()]
    for path in slabs:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if any(cached(path).any() for path in slabs):
        pytest.skip("this file system keeps all in memory")
    store.prefetch(np.array([*asked, *(client + 1000 for client in asked)]))
    pages = [np.arange(row * size // mmap.PAGESIZE, (row + 1) * size // mmap.PAGESIZE) for row in asked]
    wanted = np.concatenate(pages)
    until(lambda: all(cached(path)[wanted].all() for path in slabs))
    assert all(cached(path).sum() < 200 for path in slabs)


MEASURED = """
import re, sys
import numpy, torch
from pathlib import Path
from personafl.storage.store import Store

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

def use(store, rounds):
    cohorts = numpy.arange(rounds * 200).reshape(rounds, 200)
    for number, cohort in enumerate(cohorts):
        store.put(cohort, states)
        if number % 10 == 9:
            store.flush()
            store.collect()
    for cohort in cohorts:
        store.prefetch(cohort)
        store.take(cohort)

torch.set_num_threads(1)
states = {"w": torch.randn(200, 2000), "b": torch.randn(200, 10)}
use(Store(Path(sys.argv[1] + "-small"), 2**20), 20)  # code and allocator have what they need
before = peak()
use(Store(Path(sys.argv[1]), int(sys.argv[2])), 60)
print(peak() - before)
"""


@pytest.mark.system
def test_resident_memory_keeps_to_the_budget(tmp_path: Path) -> None:
    """12,000 states of 8,040 bytes, 96 MB, written and read: all in memory, or no more than a budget of 32 MiB."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc/self/status")
    grown = []
    for budget in (32 * 2**20, 2**30):
        command = [sys.executable, "-c", MEASURED, str(tmp_path / f"{budget}"), str(budget)]
        grown.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    assert grown[0] < 1.2 * 32 * 2**20
    assert grown[1] > 90e6


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


def test_a_single_value_of_any_stride(tmp_path: Path) -> None:
    store = Store(tmp_path / "states", 2**20)
    store.put([3], {"w": torch.tensor(5.0).expand(1), "v": torch.tensor(6.0).expand(1, 1)})
    assert same(store.get(3), {"w": torch.tensor(5.0), "v": torch.tensor([6.0])})


def test_clients_never_seen_cost_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "states", 2**20)
    store.put([999_999], {"w": torch.ones(1, 4)})
    assert (len(store), 5 in store, 999_999 in store, 10**7 in store) == (1, False, True, False)
    assert store.flush() == 1
    assert sum(path.stat().st_size for path in (tmp_path / "states").iterdir()) < 400


def test_only_the_committed_index_is_visible(tmp_path: Path) -> None:
    store = Store(tmp_path / "states", 2**20)
    store.put([1, 2], {"w": torch.tensor([[1.0], [2.0]])})
    index = store.flush()
    store.put([2, 3], {"w": torch.tensor([[20.0], [30.0]])})
    store.flush()  # durable, but no checkpoint names it
    again = Store(tmp_path / "states", 2**20, index)
    assert again.get(2)["w"].tolist() == [2.0]
    assert 3 not in again
    assert sorted(path.name for path in (tmp_path / "states").iterdir()) == ["index-000001.safetensors", "slab-1"]


@pytest.mark.parametrize("name", ["slab-1", "index-000001.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "noise", "foreign"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str, name: str) -> None:
    for folder, clients in (("states", [1, 2]), ("foreign", [3, 4])):
        store = Store(tmp_path / folder, 2**20)
        store.put(clients, {"w": torch.ones(2, 50)})
        index = store.flush()
    file = tmp_path / "states" / name
    whole, foreign = file.read_bytes(), (tmp_path / "foreign" / name).read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        noise = b"\xff" * len(whole)
        file.write_bytes({"empty": b"", "truncated": whole[:-7], "noise": noise, "foreign": foreign}[damage])
    with pytest.raises(BadInput, match=r"(slab-1|index-000001\.safetensors): the checkpoint"):
        everything(Store(tmp_path / "states", 0, index))


def everything(store: Store) -> dict[str, Tensor]:
    return store.take(store.clients)


def test_an_index_with_nonsense_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path / "states", 2**20)
    store.put([1, 2], {"w": torch.ones(2, 50)})
    index = store.flush()
    path = tmp_path / "states" / "index-000001.safetensors"
    columns = safetensors.torch.load_file(path)
    for metadata in ({}, {"layouts": "{"}, {"layouts": '{"1": [["w", "no", [50]]]}'}, {"layouts": "[]"}):
        path.write_bytes(safetensors.torch.save(columns, metadata))
        with pytest.raises(BadInput, match=r"index-000001\.safetensors: the checkpoint needs this file"):
            Store(tmp_path / "states", 0, index)
