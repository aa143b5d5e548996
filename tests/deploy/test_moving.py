"""A server of a cloud that is gone for good: its devices go on at others, and nothing that counted is lost."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clouds import CloudCluster, cloud_recipe
from offline import identity
from test_cloud_deployed import LINEAR, driven
from together import Together

from personafl.core import wire
from personafl.deploy.net.messages import Announce, Code, Refused
from personafl.deploy.server.cloudserver import CloudRounds
from personafl.deploy.server.coordination import Coordination
from personafl.recipe.recipe import Recipe
from tiers import tiered

PROTOCOLS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"protocol": "async", "first": 2},
    "rigorous": {"protocol": "rigorous", "first": 2},
    "gossip": {"protocol": "gossip", "mixing": "full"},
}


def three(protocol: str, method: str = "fedbcd", **changes: Any) -> Recipe:
    """Return a recipe of three servers with two devices each."""
    return cloud_recipe(method, 6, cloud={"servers": 3, **PROTOCOLS[protocol]}, **{"rounds": 6, **LINEAR, **changes})


def live(made: CloudCluster, out: int = 2) -> Any:
    """Return the states of the servers that are left, and of all devices; found, and as the simulator has them."""
    (servers, states), (wanted, played) = made.outcome(), made.replayed()
    del servers[out], wanted[out]
    return (servers, states), (wanted, played)


@pytest.mark.parametrize(
    ("protocol", "method", "when"),
    tiered(
        itertools.product(PROTOCOLS, ("fedbcd", "fedbcdi", "fedavg"), ("idle", "trained", "handed in")),
        [("sync", "fedbcd", "handed in"), ("async", "fedbcd", "trained")],
    ),
)
def test_devices_of_a_server_that_is_out_go_on_as_in_the_simulator(
    protocol: str, method: str, when: str, tmp_path: Path
) -> None:
    """What their server had not handed in, or what was not mixed yet, they undo."""
    with Together(three(protocol, method), tmp_path) as made:
        made.go_on(2)
        if when != "idle":
            made.collect(2)
        if when == "handed in" and not made.coordination.is_waiting(2):
            made.hand_in(2)
        made.drop(2, None if protocol == "sync" else 0)
        assert sorted(made.homes.values()) == ([0, 0, 0, 1, 1, 1] if protocol == "sync" else [0, 0, 0, 0, 1, 1])
        made.go_on()
    found, wanted = live(made)
    assert found[0] == wanted[0]
    assert found[1] == wanted[1]


@pytest.mark.parametrize(
    ("protocol", "method", "robust"),
    [
        ("async", "fedavg", {"clip": {"times": 1.0, "rounds": 3}, "most": 0.2}),
        ("sync", "fedavg", {"rule": "centered-clipping", "f": 0, "clip": {"times": 1.0}}),
        pytest.param("gossip", "ditto", {"rule": "trimmed-mean", "f": 0, "pre": ["nnm"]}, marks=pytest.mark.system),
        pytest.param("rigorous", "ditto", {"rule": "krum", "f": 0, "clip": {"times": 1.0}}, marks=pytest.mark.system),
    ],
)
def test_devices_of_a_server_that_is_out_are_taken_by_the_rule_of_their_new_one(
    protocol: str, method: str, robust: dict[str, Any], tmp_path: Path
) -> None:
    """To the simulator's bits, with who was clipped: one order of updates, wherever devices come from."""
    with Together(three(protocol, method, robust=robust), tmp_path) as made:
        made.go_on(2)
        made.collect(2)
        made.drop(2, 0)
        made.go_on()
        state: Any = made.cloud[0]._server.state
        assert len(state.fates) == 4
    found, wanted = live(made)
    assert found == wanted


def test_an_update_counts_whose_device_did_not_hear_so_before_its_server_was_out(tmp_path: Path) -> None:
    """The answer was lost; the coordinator knows whose updates were in what it mixed."""
    with Together(three("sync"), tmp_path) as made:
        made.go_on(1)
        number = made.members[2][0]
        state, kept = made.clients[number].state, {}
        accepted = state.accepted
        state.accepted = lambda: kept.update(pending=state.pending)  # type: ignore[method-assign]
        made.collect(2)
        state.accepted = accepted  # type: ignore[method-assign]
        assert kept["pending"] is state.pending
        assert state.rounds == [0]
        made.go_on(2)
        made.drop(2)
        assert made.clients[number].state.rounds == [0, 1]
        made.go_on()
    found, wanted = live(made)
    assert found == wanted


def test_the_target_of_a_server_is_the_mean_of_all_that_it_has_then(tmp_path: Path) -> None:
    """By n_i; with those that came from another server."""
    with Together(three("async"), tmp_path) as made:
        made.go_on(3)
        made.drop(2, 0)
        made.go_on(4)
        block: Any = made.cloud[0]._server.state
        own = [number for number, home in made.homes.items() if home == 0]
        weights = np.array([made.clients[number].samples for number in own], dtype=np.float64)
        models = [made.clients[number].state.entry for number in own]
    assert len(own) == 4
    assert float(block.population) == weights.sum()
    for name, target in block.target.items():
        stacked = torch.stack([model[f"model/{name}"].double() for model in models if model is not None])
        mean = torch.tensordot(torch.from_numpy(weights / weights.sum()), stacked, dims=1)
        torch.testing.assert_close(target.double(), mean, rtol=1e-4, atol=1e-6)


def test_a_server_that_starts_again_knows_of_devices_of_others(tmp_path: Path) -> None:
    """Between their coming and the end of the round from which on they count; a coordinator knows too."""
    with Together(three("async"), tmp_path) as made:
        made.go_on(2)
        made.drop(2, 0)
        made.cloud[0].open_next()
        state, opened = wire.encode(made.cloud[0]._server.state), made.cloud[0].open
        moves = made.coordination.moves.of(0)
        assert opened is not None
    with CloudRounds(made.recipe, tmp_path / "cloud-0", 0) as again:
        assert wire.encode(again._server.state) == state
        assert again.open is not None
        assert (again.open.cohort, again.open.letters.digest) == (opened.cohort, opened.letters.digest)
        assert len(again.adopted) == 2
        number = made.members[2][0]
        assert again.welcome(identity(number)).run == moves[0].run
        assert again.welcome(identity(number)).moved is None  # it is in, and introduces itself no more
    with Coordination(made.recipe, tmp_path / "coordinator") as later:
        assert later.moves.of(0) == moves
        assert later.round_of(2) == -1
        assert later.drop(2)  # it was before
        with pytest.raises(Refused) as caught:
            later.announce(2, Announce(round=2, clients=2), b"")
        assert caught.value.code is Code.WRONG_ROUND


def test_a_server_that_is_done_expects_devices_that_look_for_it_still(tmp_path: Path) -> None:
    """Until each has come, also after the last round, and has heard that all is done."""
    with Together(three("async"), tmp_path) as made:
        made.go_on(5)
        made.coordination.drop(2, 0)
        made.cloud[0].adopt(made.coordination.moves.of(0))
        made.go_on()
        home, (first, second) = made.cloud[0], made.members[2]
        assert home.finished
        for number in (*made.members[0], first):
            assert home.expecting
            if number == first:
                made.enrol(0, number)
            home.leave(number)
        assert home.expecting
        made.enrol(0, second)
        assert home.expecting
        home.revoked = frozenset({second})
        assert not home.expecting
        home.revoked = frozenset()
        home.leave(second)
        assert not home.expecting
        assert not made.cloud[1].expecting


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_what_cannot_be_dropped(method: str, tmp_path: Path) -> None:
    with Together(three("async", method), tmp_path) as made:
        with pytest.raises(Refused, match=f"servers of {method} keep something of every device, .* begin a new run"):
            made.coordination.drop(2)
        assert not made.coordination.moves.out
        with pytest.raises(Refused, match="cloud-2 can take the devices of cloud-2"):
            made.coordination.moves.planned(2, 2, range(3))
        with pytest.raises(Refused, match="no other server can take the devices of cloud-0"):
            made.coordination.moves.planned(0, None, range(1))


@pytest.mark.system
def test_a_coordinator_goes_on_elsewhere_from_its_folder() -> None:
    (result,) = driven("elsewhere")
    assert result["equal"]
    assert 3 <= result["before"] < result["rounds"]
    assert sorted(result["joined"]) == [0, 1, 2]  # once each: nobody began anew


@pytest.mark.system
@pytest.mark.parametrize("protocol", ["sync", "async"])
def test_a_killed_server_whose_devices_are_sent_elsewhere(protocol: str) -> None:
    (result,) = driven("out", protocol)
    assert result["equal"]
    assert result["moved"] == 3
