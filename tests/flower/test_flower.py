"""A recipe as a Flower app: the simulator's bits, and what happens when nodes fail, lie, restart or are lost."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import States, plain, recipe_of, simulated
from typer.testing import CliRunner

from personafl.cli import app as cli
from personafl.core import wire
from personafl.deploy.device.dealing import deal
from personafl.deploy.device.state import DeviceState
from personafl.errors import BadInput
from personafl.models.modelfile import card_of
from personafl.storage.rundir import RunDirectory

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import ConfigRecord, Message, RecordDict
from nodes import Node, Nodes

from personafl.flower import server as server_module
from personafl.flower.app import write_app
from tiers import tiered


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are there at once: nothing to wait for."""
    for name, seconds in (("_POLL", 0.001), ("_LOOK", 0.0), ("_PAUSE", 0.05)):
        monkeypatch.setattr(server_module, name, seconds)


def journal(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]


def closed(out: Path) -> list[list[int]]:
    return [entry["taken"] for entry in journal(out) if entry["event"] == "closed"]


def refusals(out: Path) -> set[tuple[str, str]]:
    return {(entry["who"], entry["code"]) for entry in journal(out) if entry["event"] == "refused"}


def outcome(made: Nodes) -> tuple[bytes, States]:
    run = journal(made.out)[0]["run"]
    states = {}
    for node in made.nodes.values():
        state = DeviceState(node.state / run, run, node.number)
        assert state.finished
        assert state.pending is None
        if state.entry:
            states[node.number] = plain(state.entry)
    directory = RunDirectory(made.out)
    return directory.server_bytes(directory.checkpoint()), states


@pytest.mark.parametrize("method", tiered(["fedavg", "scaffold", "ditto", "fedalt"], ["fedalt"]))
def test_nodes_give_the_simulators_bits(method: str, tmp_path: Path) -> None:
    recipe = recipe_of(method)
    made = Nodes(recipe, tmp_path)
    made.serve()
    assert outcome(made) == simulated(recipe)
    assert [node.asked for node in made.nodes.values()] == [["query", "train", "train", "train", "query.finish"]] * 3


@pytest.mark.system
def test_so_they_do_with_a_robust_rule(tmp_path: Path) -> None:
    recipe = recipe_of("ditto", robust={"rule": "centered-clipping", "f": 1, "clip": {"times": 1.0}})
    made = Nodes(recipe, tmp_path)
    made.serve()
    assert outcome(made) == simulated(recipe)
    assert any("clipped" in entry for entry in journal(made.out) if entry["event"] == "closed")


def test_a_node_refuses_what_its_policy_does_not_agree_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its answer is an error, which Flower hands on: nothing of its data is in it, and no state is made."""
    made = Nodes(recipe_of("fedavg", 2, {"devices": 1}, rounds=1), tmp_path)
    strict = made.nodes[100]
    strict.policy = tmp_path / "policy.toml"
    strict.policy.write_text("least_batch = 64\n")
    made.serve()
    assert closed(made.out) == [[made.nodes[101].number]]
    assert (
        f"{strict.policy}: least_batch = 64: the recipe of the ServerApp makes a step from 16"
        in capsys.readouterr().out
    )
    assert not list(strict.state.rglob("*.safetensors"))
    assert set(strict.asked) == {"query"}


@pytest.mark.system
def test_so_they_do_with_cohorts_and_networks_of_their_own(tmp_path: Path) -> None:
    profiles = [
        {"name": "small", "clients": ["0"], "bits": 2, "model": {"name": "mlp", "hidden": [6, 6]}},
        {"name": "large", "clients": ["1", "2"]},
    ]
    recipe = recipe_of("quped", devices=profiles, federation={"cohort": 2}, rounds=4)
    made = Nodes(recipe, tmp_path)
    made.serve()
    assert outcome(made) == simulated(recipe)
    run = journal(made.out)[0]["run"]
    cards = [card_of(node.state / run / "model.safetensors") for node in made.nodes.values()]
    assert [card.network.options for card in cards] == [{"hidden": [6, 6]}, {"hidden": [8]}, {"hidden": [8]}]


@pytest.mark.parametrize("pulls", tiered([1, 2, 3, 4], []))
def test_an_app_that_was_stopped_goes_on_to_the_same_bits(pulls: int, tmp_path: Path) -> None:
    recipe = recipe_of("fedalt")
    made = Nodes(recipe, tmp_path)
    left = iter(range(pulls))

    def stop() -> None:
        if next(left, None) is None:
            raise InterruptedError

    made.before_pull = stop
    with pytest.raises(InterruptedError):
        made.serve()
    made.before_pull = lambda: None
    made.serve()
    assert outcome(made) == simulated(recipe)


def test_a_node_whose_answer_was_lost_and_that_restarts_answers_as_before(tmp_path: Path) -> None:
    """It comes back as another node, long before Flower knows that the first is gone; its update was in its folder."""
    recipe = recipe_of("fedalt")
    made = Nodes(recipe, tmp_path)
    (id_, node), *_ = made.nodes.items()

    def lost(answer: Message) -> Message | None:
        if node.asked.count("train") < 2:
            return answer
        made.nodes[id_] = Node(node.number, node.data, tmp_path / "dead", change=lambda later: None)
        made.nodes[id_ + 50] = node
        node.change = lambda later: later
        return None

    node.change = lost
    made.serve()
    del made.nodes[id_]
    assert outcome(made) == simulated(recipe)
    assert node.asked == ["query", "train", "train", "query", "train", "train", "query.finish"]


def test_a_node_that_restarts_with_the_same_key_is_asked_again(tmp_path: Path) -> None:
    recipe = recipe_of("fedalt")
    made = Nodes(recipe, tmp_path)
    node = made.nodes[101]

    def lost(answer: Message) -> Message | None:
        if node.asked.count("train") != 1 or node.activated == "2":
            return answer
        node.activated = "2"
        return None

    node.change = lost
    made.serve(authenticated=True)
    assert outcome(made) == simulated(recipe)


def test_a_silent_node_does_not_hold_up_a_round_and_keeps_its_old_state(tmp_path: Path) -> None:
    recipe = recipe_of("ditto", 3, {"deadline": 0.5, "min_completion": 0.5}, rounds=2)
    made = Nodes(recipe, tmp_path)
    node = made.nodes[102]
    node.change = lambda answer: None if node.asked[-1:] == ["train"] and node.asked.count("train") == 1 else answer
    made.serve()
    assert closed(made.out) == [[0, 1], [0, 1, 2]]
    run = journal(made.out)[0]["run"]
    assert DeviceState(node.state / run, run, 2).rounds == [1]


def test_a_node_that_fails_is_named_left_alone_and_asked_again(tmp_path: Path) -> None:
    recipe = recipe_of("fedalt")
    made = Nodes(recipe, tmp_path)
    node = made.nodes[100]
    data = node.data
    node.data = tmp_path / "gone.safetensors"

    def mend(answer: Message) -> Message:
        node.data = data
        return answer

    node.change = mend
    made.serve()
    assert outcome(made) == simulated(recipe)
    assert refusals(made.out) == {("node-100", "NODE_FAILED")}
    assert any("gone.safetensors" in str(entry.get("text")) for entry in journal(made.out))


def poisoned(answer: Message) -> Message:
    """Put a number that is none into an update."""
    record = answer.content.config_records["trained"]
    named = wire.decode_named(bytes(record["payload"]))  # type: ignore[arg-type]
    first = next(name for name, value in named.items() if value.is_floating_point())
    named[first] = torch.full_like(named[first], float("nan"))
    return answered(answer, "trained", wire._saved(named))


def answered(answer: Message, kind: str, payload: bytes) -> Message:
    header = answer.content.config_records["trained"]["header"]
    return Message(RecordDict({kind: ConfigRecord({"header": header, "payload": payload})}), reply_to=answer)


@pytest.mark.parametrize(
    ("lie", "code"),
    [
        (poisoned, "NOT_FINITE"),
        (lambda answer: answered(answer, "trained", b"x" * 10**6), "TOO_LARGE"),
        (lambda answer: answered(answer, "trained", b"{}"), "BAD_PAYLOAD"),
        (lambda answer: answered(answer, "present", b""), "MALFORMED"),
        (lambda answer: Message(RecordDict(), reply_to=answer), "MALFORMED"),
    ],
)
def test_an_update_is_checked_before_it_is_taken(lie: Any, code: str, tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", 3, {"deadline": 0.5, "min_completion": 0.5}, rounds=1)
    made = Nodes(recipe, tmp_path)
    node = made.nodes[100]

    def change(answer: Message) -> Message:
        if not answer.has_content() or "trained" not in answer.content.config_records:
            return answer
        told = lie(answer)
        told.metadata.__dict__["_reply_to_message_id"] = answer.metadata.reply_to_message_id
        return told

    node.change = change
    made.serve()
    assert closed(made.out) == [[1, 2]]
    assert refusals(made.out) == {("client-0", code)}


def test_a_number_belongs_to_the_key_that_it_first_came_with(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", 3, {"devices": 2}, rounds=1)
    made = Nodes(recipe, tmp_path)
    thief = made.nodes[102]
    thief.number, thief.key = 0, b"another"
    made.serve(authenticated=True)
    assert ("node-102", "NUMBER_TAKEN") in refusals(made.out)
    assert closed(made.out) == [[0, 1]]


def test_a_node_without_its_config_says_what_is_missing(tmp_path: Path) -> None:
    made = Nodes(recipe_of("fedavg", 3, {"devices": 2}, rounds=1), tmp_path)
    made.nodes[102].number = -1
    made.serve()
    assert any("--node-config: client" in str(entry.get("text")) for entry in journal(made.out))


def test_an_app_needs_a_run_directory(tmp_path: Path) -> None:
    made = Nodes(recipe_of("fedavg"), tmp_path)
    with pytest.raises(BadInput, match="--run-config"):
        made.serve(out="")


def test_the_folder_of_an_app_is_thin(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", name="Ward_7")
    with pytest.raises(BadInput, match=r"^data\.normalize: a Flower app does not add up"):
        write_app(recipe, tmp_path / "app")
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"normalize": "none"})})
    write_app(recipe, tmp_path / "app")
    files = {str(file.relative_to(tmp_path / "app")) for file in (tmp_path / "app").rglob("*") if file.is_file()}
    package = ("__init__.py", "client.py", "recipe.toml", "server.py")
    assert files == {"pyproject.toml", *(f"personafl_app/{name}" for name in package)}
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert project["project"]["name"] == "personafl-ward-7"
    assert project["project"]["dependencies"] == []
    with pytest.raises(BadInput, match="is there already"):
        write_app(recipe, tmp_path / "app")
    with pytest.raises(BadInput, match="deploy: missing"):
        write_app(recipe.model_copy(update={"deploy": None}), tmp_path / "other")


def test_the_command_writes_it(tmp_path: Path) -> None:
    deal(recipe_of("fedavg"), tmp_path / "dealt")
    words = ["flower", str(tmp_path / "dealt" / "recipe.toml"), "rounds=7", "--out", str(tmp_path / "app")]
    said = CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False)
    assert "flwr run" in said.output
    assert tomllib.loads((tmp_path / "app" / "personafl_app" / "recipe.toml").read_text())["rounds"] == 7


def test_a_private_app_adds_the_noise_of_a_server(tmp_path: Path) -> None:
    """By the same rounds: the key is in the run directory, and the ledger in the journal."""
    pytest.importorskip("dp_accounting", reason="differential privacy is accounted for by dp-accounting")
    data = {"normalize": "none", "partition": {"kind": "dirichlet", "clients": 2, "alpha": 0.5}}
    privacy = {"clip": 0.5, "noise": 2.0, "epsilon": 3.0}
    made = Nodes(recipe_of("fedavg", 2, rounds=5, federation={"cohort": 2}, privacy=privacy, data=data), tmp_path)
    made.serve()
    charged = [entry["round"] for entry in journal(made.out) if entry["event"] == "sealed" and "privacy" in entry]
    assert charged == list(range(len(closed(made.out))))
    assert 1 < len(charged) < 5  # the budget is spent before the last round
    assert (made.out / "noise.key").stat().st_size == 32
