"""A server that is gone for good while its devices are without contact: they train on, go to others, and hand in."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from offline import identity
from test_cloud_deployed import driven
from test_moving import live, three
from together import Together

from personafl.deploy.device.alone import Alone
from personafl.deploy.device.homes import Homes
from personafl.deploy.device.state import DeviceState
from personafl.deploy.net.messages import Code, Refused, Welcome
from tiers import tiered


def entry_of(made: Together, number: int) -> Any:
    """Return a device's state: its x_i, the iterate before, and how many rounds it was alone."""
    return {path: leaf.clone() for path, leaf in (made.clients[number].state.newest or {}).items()}


def train_alone(made: Together, number: int, rounds: int) -> list[int]:
    """Let a device train so many rounds without contact, as far as it does; return which."""
    alone, before = Alone(made.clients[number]), len(made.clients[number].state.alone)
    while (round_ := alone.next) is not None and rounds and alone.train(round_):
        rounds -= 1
    state = made.clients[number].state
    return state.alone[before:] if state.pending is None else list(state.pending.alone)


def weights(made: Together, numbers: list[int]) -> torch.Tensor:
    """Return n_i / Σn."""
    samples = np.array([made.clients[number].samples for number in numbers], dtype=np.float64)
    return torch.from_numpy(samples / samples.sum())


def check_equations(made: Together, place: int) -> None:
    """Check a server's Σn_i; and its target, which is Σ_i n_i x_i / Σ_i n_i over the devices of its last round."""
    block: Any = made.cloud[place]._server.state
    own = [number for number, home in made.homes.items() if home == place]
    assert float(block.population) == sum(made.clients[number].samples for number in own)
    shares, entries = weights(made, own), [made.clients[number].state.entry for number in own]
    for name, target in block.target.items():
        stacked = torch.stack([entry[f"model/{name}"].double() for entry in entries if entry is not None])
        torch.testing.assert_close(target.double(), torch.tensordot(shares, stacked, dims=1), rtol=1e-5, atol=1e-7)


def mix_unheard(made: Together, number: int) -> None:
    """Let another mix have an update in it whose device did not hear that it was taken."""
    state = made.clients[number].state
    accepted, done = state.accepted, len(state.rounds)
    state.accepted = lambda: None  # type: ignore[method-assign]
    made.collect(2)
    state.accepted = accepted  # type: ignore[method-assign]
    assert state.pending is not None
    while made.coordination._counted[2].round < state.pending.round:
        made.go_on(made.coordination.done + 1)
    assert len(state.rounds) == done


@pytest.mark.parametrize(
    ("protocol", "when"),
    tiered(
        itertools.product(("async", "sync", "rigorous", "gossip"), ("mixed", "taken", "handed in", "unheard")),
        [("async", "mixed"), ("sync", "taken")],
    ),
)
def test_devices_that_trained_alone_when_their_server_was_lost(protocol: str, when: str, tmp_path: Path) -> None:
    """What counted is kept with all that was trained alone since; what did not is undone with what came after it."""
    with Together(three(protocol, "fedbcdi", rounds=9), tmp_path) as made:
        made.go_on(2)
        first, second = made.members[2]
        before = {number: entry_of(made, number) for number in (first, second)}
        if when == "unheard":
            mix_unheard(made, first)
        elif when != "mixed":
            made.collect(2)
        if when == "handed in" and not made.coordination.is_waiting(2):
            made.hand_in(2)
        # In async another server waits by then, and they are mixed at once.
        counts = when in ("mixed", "unheard") or (when == "handed in" and not made.coordination.is_waiting(2))
        trained = {first: train_alone(made, first, 2), second: train_alone(made, second, 9)}
        assert list(map(len, trained.values())) == [2, 4]  # wait_after is 4
        kept = {number: entry_of(made, number) for number in (first, second)}
        made.drop(2, None if protocol == "sync" else 0)
        for number in (first, second):
            moved = entry_of(made, number)
            wanted = kept[number] if counts else before[number]
            assert moved.keys() == wanted.keys()
            assert all(torch.equal(leaf, wanted[path]) for path, leaf in moved.items())
            assert made.clients[number].state.alone == (trained[number] if counts else [])
        made.go_on(made.coordination.done + 3)
        if protocol != "sync":  # there the model of all has them in it
            check_equations(made, 0)
        made.go_on()
        lines = [line for name in made.servers[:2] for line in made.journal(name)]
    handed = {line["number"]: line["alone"] for line in lines if line["event"] == "accepted" and line.get("alone")}
    assert handed == (trained if counts else {})
    found, played = live(made)
    assert found[0] == played[0]
    assert found[1] == played[1]


def test_what_counted_is_kept_by_a_device_whose_second_server_is_lost_too(tmp_path: Path) -> None:
    """Also if that one is behind the first: it was waited for by nobody."""
    with Together(three("async", "fedbcdi", rounds=8), tmp_path) as made:
        made.go_on(1)
        made.collect(0)  # and then it hands in nothing
        for _ in range(3):
            for place in (1, 2):
                made.collect(place)
                made.hand_in(place)
            for place in (1, 2):
                made.proceed(place)
        number = made.members[2][0]
        rounds, kept = list(made.clients[number].state.rounds), entry_of(made, number)
        made.drop(2, 0)
        made.drop(0, 1)
        assert made.clients[number].state.rounds == rounds
        assert all(torch.equal(leaf, kept[path]) for path, leaf in entry_of(made, number).items())
        assert set(made.homes.values()) == {1}
        made.go_on()
        check_equations(made, 1)


def test_a_device_knows_its_home_from_one_that_had_it_before(tmp_path: Path) -> None:
    """Others refuse it; one that was dropped and is back would have it, and would undo what it did since."""
    with Together(three("async", "fedbcdi"), tmp_path) as made:
        number = made.members[2][0]
        with pytest.raises(Refused, match="is cloud-2's") as caught:
            made.cloud[0].welcome(identity(number))
        assert caught.value.code is Code.WRONG_SERVER
        made.go_on(2)
        folder = tmp_path / "devices" / f"device-{number}"
        homes = Homes.__new__(Homes)
        homes._state = folder
        old = made.cloud[2].welcome(identity(number))
        assert homes.is_home(old)
        made.coordination.drop(2, 0)
        made.cloud[0].adopt(made.coordination.moves.of(0))
        assert homes.is_home(made.cloud[0].welcome(identity(number)))
        made.enrol(0, number)
        assert DeviceState.home_of(folder) == (made.cloud[2].run, made.cloud[0].run)
        new = made.cloud[0].welcome(identity(number))
        assert new.moved is None
        assert homes.is_home(new)
        assert not homes.is_home(old)
        assert not homes.is_home(Welcome(run="another"))
        homes._state = tmp_path / "nobody"
        assert homes.is_home(old)


@pytest.mark.system
@pytest.mark.parametrize("protocol", ["sync", "async"])
def test_processes_that_train_alone_find_their_new_servers_by_themselves(protocol: str) -> None:
    (result,) = driven("lost", protocol)
    assert result["equal"]
    assert result["alone"] == [4, 4, 4]
    code, line = result["came back"]
    assert code == 1
    assert "refused this server: DROPPED: cloud-2 was dropped by an operator" in line
