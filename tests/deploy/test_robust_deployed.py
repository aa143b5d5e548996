"""Robust rules on a server of devices: the simulator's bits, too few updates, and who is clipped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from offline import QUICK, Maps, Offline, identity
from processes import recipe_of, simulated

from crash_driver import Failpoints, ended, forked
from personafl.core import tree, wire
from personafl.deploy.net.messages import Update
from personafl.deploy.server.going_back import roll_back
from personafl.deploy.server.rounds import Rounds
from personafl.deploy.server.suspects import ROW
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from tiers import tiered

RULES: dict[str, dict[str, Any] | None] = {
    "default": None,
    "nnm": {"rule": "trimmed-mean", "f": 1, "pre": ["nnm"]},
    "centered": {"rule": "centered-clipping", "f": 0.2, "radius": 0.5, "clip": {"times": 1.5}},
    "fixed": {"clip": 0.05},
    "chosen": {"rule": "multi-krum", "f": 1, "pre": ["arc"]},
}


def robust_recipe(rule: str, method: str = "fedavg", rounds: int = 3, **changes: Any) -> Recipe:
    robust = {} if RULES[rule] is None else {"robust": RULES[rule]}
    return recipe_of(method, 5, rounds=rounds, **{**QUICK, **robust, **changes})


def outcome(run: Offline) -> tuple[bytes, Any]:
    """Return what came out; devices without a state have none in the simulator."""
    server, states = run.outcome()
    return server, {number: state for number, state in states.items() if state}


def hostile(run: Offline, number: int, factor: float = -1e4) -> None:
    """Let a device send its update many times as long, and backwards."""
    run.train(number)
    pending = run.clients[number].state.pending
    assert pending is not None
    update = wire.dense(wire.decode(pending.update, wire.dense(run.rounds._likes[0])))
    bad: Any = tree.map(lambda leaf: factor * leaf, update)
    told = Update(round=pending.round, model=pending.model, samples=run.clients[number].samples)
    run.rounds.accept(identity(number), told, wire.encode(bad._replace(loss=update.loss)))
    run.clients[number].state.accepted()


@pytest.mark.parametrize(
    ("rule", "method"),
    tiered(
        [(rule, method) for rule in RULES for method in ("fedavg", "ditto")],
        [("default", "ditto"), ("nnm", "fedavg"), ("centered", "ditto")],
    ),
)
def test_a_server_of_devices_has_the_simulators_bits(rule: str, method: str, tmp_path: Path) -> None:
    recipe = robust_recipe(rule, method)
    with Offline(recipe, tmp_path) as run:
        assert outcome(run.go_on()) == simulated(recipe)
        assert type(run.rounds._server.state).__name__ == "Robust"


@pytest.mark.system
def test_updates_in_compact_forms_too(tmp_path: Path) -> None:
    recipe = robust_recipe("default", "ditto", rounds=2, uplink={"form": "sparse", "keep": 0.2})
    with Offline(recipe, tmp_path) as run:
        assert outcome(run.go_on()) == simulated(recipe)


def test_updates_are_looked_at_where_they_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is decoded again when a round closes; what was damaged since it came is named."""
    with Offline(robust_recipe("default"), tmp_path) as run:
        run.open()
        for number in range(5):
            run.train(number)
            run.settle(number)
        kept, taken = run.rounds._updates, run.rounds._open.taken
        for number, digest in taken.items():
            named, again = kept.mapped(number, digest), wire.decode_named(kept.read(number, digest))
            assert named.keys() == again.keys()
            assert all(torch.equal(named[name], leaf) for name, leaf in again.items())
        monkeypatch.setattr(wire, "decode_named", lambda data: pytest.fail("it was read into memory"))
        assert run.rounds._joined() is not None
        path = kept._path
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        with pytest.raises(BadInput, match="was lost or damaged since it was accepted"):
            run.rounds._joined()
        path.unlink()
        with pytest.raises(BadInput, match="was lost or damaged since it was accepted"):
            run.rounds._joined()


def test_a_rule_that_compares_updates_takes_one_file_descriptor_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each map of a piece has one of its own while it is held, and connections leave few: large rounds would fail."""
    maps = Maps(monkeypatch)
    with Offline(robust_recipe("nnm", rounds=1), tmp_path) as run:
        run.go_on()
    assert maps.made >= 5
    assert maps.most <= 2


@pytest.mark.parametrize("rule", tiered(["default", "centered"], ["centered"]))
def test_a_server_that_goes_back_or_starts_again_keeps_the_bits(rule: str, tmp_path: Path) -> None:
    recipe = robust_recipe(rule, rounds=4)
    wanted = simulated(recipe)
    with Offline(recipe, tmp_path) as run:
        run.go_on(2).open()
        run.train(0)
        run.settle(0)
    with Offline(recipe, tmp_path) as run:  # as after a kill
        run.go_on(3)
        given = run.recipe
    roll_back(given, tmp_path / "run", 1)
    with Offline(recipe, tmp_path) as run:
        assert run.rounds.done == 1
        assert outcome(run.go_on()) == wanted


def test_a_round_with_too_few_updates_for_its_rule_waits(tmp_path: Path) -> None:
    """Of five devices one may be hostile: NNM and the trimmed mean hold with three, and no round closes with two."""
    with Offline(robust_recipe("nnm", rounds=2), tmp_path) as run:
        rounds = run.rounds
        assert rounds.least == 3
        run.open()
        for number in (0, 1):
            run.train(number)
            run.settle(number)
        for number in (2, 3, 4):
            rounds.leave(number)
        assert not any([rounds.complete, rounds.enough, rounds.may_close])
        assert rounds.lacking == ", and robust.rule holds with 3 or more"
        rounds.drop("device-1")  # what it sent goes too
        assert not rounds.may_close
        for number in (1, 2):
            rounds.drop("device-1", undo=True) if number == 1 else None
            run.clients[number] = run._client(number)
            run.train(number)
            run.settle(number)
        assert rounds.complete
        assert not rounds.lacking
        assert len(rounds.close().taken) == 3
        rounds.open_next()  # three are there, and are enough
        assert rounds.open is not None
        assert rounds.open.wanted == 3


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"robust": {"rule": "median", "f": 3}}, r"among at least 7, and here are 5.* \(deploy.devices is 5\)"),
        ({"robust": {"rule": "median", "f": 0.1}}, "robust.f: a share 0.1 of the 5 updates"),
    ],
)
def test_rounds_that_are_planned_too_small_are_refused_at_once(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=match):
        Rounds(robust_recipe("default", **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def clipped_run(folder: Path, rounds: int = ROW + 1) -> Offline:
    """Return a run whose last device is hostile in all rounds but the last."""
    run = Offline(robust_recipe("default", rounds=rounds + 1, training={"steps": 6, "batch": 16}), folder)
    while run.rounds.done < rounds:
        run.open()
        for number in range(4):
            run.train(number)
            run.settle(number)
        hostile(run, 4)
        run.rounds.close()
    return run


def test_who_is_clipped_is_counted_and_told_of_once(tmp_path: Path) -> None:
    with clipped_run(tmp_path, ROW) as run:
        suspects, last = run.rounds.suspects, run.rounds.last
        assert last is not None
        assert last.met.far == (4,)
        assert 4 in last.met.clipped
        assert suspects.of(4) == {"clipped": ROW, "far": ROW, "left_out": 0}
        text = dict(suspects.alerts(last))["device-4"]
        assert f"device-4 were twice the clip or longer, or left out, in {ROW} rounds in a row" in text
        assert list(dict(suspects.alerts(last))) == ["device-4"]
        metrics = {metric.name: metric.samples for metric in suspects.metrics()}
        counts = {sample.labels["device"]: sample.value for sample in metrics["personafl_updates_clipped_total"]}
        assert counts["device-4"] == ROW
        assert "personafl_updates_left_out_total" not in metrics
        suspects.hear({"event": "closed", "taken": [4], "clipped": [4], "far": [4]})
        assert "device-4" not in dict(suspects.alerts(last))  # it was told of
        assert "device-4" in dict(suspects.alerts())  # by a server that starts again
        suspects.hear({"event": "closed", "taken": [4], "clipped": [4]})
        assert "device-4" not in dict(suspects.alerts())
    with Offline(run.recipe, tmp_path) as again:  # as after a kill
        assert again.rounds.suspects.of(4) == {"clipped": ROW, "far": ROW, "left_out": 0}
        assert "device-4" in dict(again.rounds.suspects.alerts())


@pytest.mark.system
def test_no_count_is_lost_in_a_kill_at_any_write_of_closing(tmp_path: Path) -> None:
    """Also between the checkpoint and the line that says so: whose updates were clipped is in the state."""
    with clipped_run(tmp_path / "run", 1) as made:
        made.open()
        for number in range(4):
            made.train(number)
            made.settle(number)
        hostile(made, 4)
    for at in range(1000):
        folder = tmp_path / f"at{at}"
        shutil.copytree(tmp_path / "run" / "run", folder)

        def closing(folder: Path = folder, at: int = at) -> None:
            with Rounds(made.recipe, folder) as rounds:
                Failpoints(folder, at)
                rounds.close()

        code = ended(forked(closing))
        with Rounds(made.recipe, folder) as rounds:
            if rounds.open is not None:
                rounds.close()
            assert rounds.suspects.of(4)["clipped"] == 2
            assert rounds.last is not None
            assert 4 in rounds.last.met.clipped
        if not code:
            assert at > 5
            return
