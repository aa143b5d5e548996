"""States that stay on a GPU between checkpoints: here on a CPU, where they are the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from personafl.algorithms import METHODS, Training
from personafl.core.batches import Steps
from personafl.simulate.resident import ResidentStates
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store
from personafl.testing import make_case

CPU = torch.device("cpu")
CLIENTS = 12
BYTES = 6 * 4 + 2 * 8  # of a state


def _states(clients: np.ndarray, generator: np.random.Generator) -> dict[str, torch.Tensor]:
    values = torch.from_numpy(generator.normal(size=(len(clients), 3, 2)).astype(np.float32))
    return {"a": values.mT.contiguous().mT, "b": torch.from_numpy(generator.integers(9, size=(len(clients), 2)))}


@pytest.mark.parametrize("room", [0, 2, 5, 9, 100], ids=lambda room: f"room for {room}")
def test_it_is_a_store(tmp_path: Path, room: int) -> None:
    generator, truth = np.random.default_rng(room), {}
    store = Store(tmp_path / "states", 2**20)
    states, index = ResidentStates(store, CLIENTS, CPU, room * BYTES), 0
    saved: dict[int, dict[str, torch.Tensor]] = {}
    for turn in range(60):
        clients = generator.permutation(CLIENTS)[: generator.integers(1, 8)]
        new = _states(clients, generator)
        states.put(clients, new)
        truth |= {int(client): {path: leaf[row] for path, leaf in new.items()} for row, client in enumerate(clients)}
        known = np.array(sorted(truth))
        assert states.clients.tolist() == known.tolist()
        assert states.has(np.arange(CLIENTS)).tolist() == [client in truth for client in range(CLIENTS)]
        states.prefetch(known)
        asked = generator.permutation(known)[: generator.integers(1, len(known) + 1)]
        for wanted in (asked, clients):
            found = states.take(wanted)
            for path, leaf in found.items():
                assert torch.equal(leaf, torch.stack([truth[int(client)][path] for client in wanted]))
                assert leaf.is_contiguous()
        if turn % 7 == 3:
            index, saved = states.flush(), dict(truth)
            states.collect()
    again = Store(tmp_path / "states", 2**20, index)  # as a crash leaves it: what the last checkpoint had
    assert again.clients.tolist() == sorted(saved)
    for client, state in saved.items():
        assert all(torch.equal(leaf, state[path]) for path, leaf in again.get(client).items())


def test_states_of_several_layouts_are_kept_beside_each_other(tmp_path: Path) -> None:
    states = ResidentStates(Store(tmp_path / "states", 2**20), 4, CPU, 2**20)
    states.put(np.array([0, 2]), {"a": torch.ones(2, 3)})
    states.put(np.array([1]), {"b": torch.zeros(1, 5)})
    states.flush()
    assert states.take(np.array([2, 0]))["a"].shape == (2, 3)
    assert states.take(np.array([1]))["b"].shape == (1, 5)


@pytest.mark.parametrize("room", [0, 10**9])
def test_a_simulation_has_the_same_bits_with_it(tmp_path: Path, room: int) -> None:
    case = make_case(METHODS["ditto"].build(Training(work=Steps(epochs=1, batch=4))))
    plain = Simulation(case.federation(), Store(tmp_path / "plain", 2**20))
    simulation = Simulation(case.federation(), Store(tmp_path / "states", 2**20))
    simulation.store = ResidentStates(simulation.store, case.data.clients, CPU, room)
    for number in range(3):
        plain.step(number)
        simulation.step(number)
    assert len(plain.store)
    for client in plain.store.clients.tolist():
        wanted, found = plain.store.get(client), simulation.store.get(client)
        assert all(torch.equal(found[path], leaf) for path, leaf in wanted.items())
