"""What a server that a device trusts too much can say: each ends in one line, or is outlived; nothing is kept of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tomli_w
import torch
from deploy_harness import Loopback, answering
from processes import recipe_of

from personafl.core import wire
from personafl.deploy.device import device as device_module
from personafl.deploy.device import training
from personafl.deploy.device.policy import Policy
from personafl.deploy.device.state import DeviceState
from personafl.deploy.net import messages
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Message, Said
from personafl.deploy.server.opening import open_federation
from personafl.errors import PersonaError
from tiers import tiered

RUN = "0" * 32
WELCOME = messages.Welcome(run=RUN)


@dataclass
class Script:
    """What a server answers: a recipe to a knock, and to each pull the next answer, the last for ever."""

    recipe: bytes
    pulls: list[Said] = field(default_factory=lambda: [Said(messages.Wait())])
    others: dict[str, Message] = field(default_factory=dict)  # by the kind of what is asked
    asked: list[str] = field(default_factory=list)

    async def __call__(self, identity: Identity, said: Said) -> Said:
        kind = said.message.kind
        self.asked.append(kind)
        if kind in self.others:
            return Said(self.others[kind])
        if kind == messages.Knock.kind:
            return Said(WELCOME, self.recipe)
        if kind == messages.Pull.kind:
            return self.pulls.pop(0) if len(self.pulls) > 1 else self.pulls[0]
        usual = {"hello": messages.Enrolled(), "update": messages.Accepted(before=False), "leave": messages.Left()}
        return Said(usual.get(kind, messages.Alive(open=True)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Loopback:
    return Loopback(recipe_of("ditto", 2, rounds=3), tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def broadcast(made: Loopback) -> bytes:
    return wire.encode(open_federation(made.recipe).serving().broadcast())


@pytest.fixture(autouse=True)
def afresh(made: Loopback, tmp_path: Path) -> Iterator[None]:
    made.folder, before = tmp_path, made.folder
    (tmp_path / "pki").symlink_to(before / "pki")
    (tmp_path / "dealt").symlink_to(before / "dealt")
    made.said.clear()
    yield
    made.folder = before


def ended(made: Loopback, script: Script, policy: Policy | None = None) -> str:
    """Return the line that a device ends with."""

    async def whole() -> None:
        async with answering(made.folder / "pki", script) as made.port:
            await made.device("device-0", policy=policy)

    with pytest.raises(PersonaError) as caught:
        asyncio.run(whole())
    line = str(caught.value)
    assert "\n" not in line
    return line


def of(made: Loopback, **changes: Any) -> bytes:
    values = made.recipe.model_dump(mode="json", exclude_none=True)
    for key, value in changes.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    return tomli_w.dumps(values).encode()


def kept(made: Loopback) -> DeviceState:
    return DeviceState(made.folder / "devices" / "device-0", RUN, 0)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"#" * (2**20 + 1), "sent what this device refuses: TOO_LARGE"),
        (b"", "has no deploy section"),
        (b"a = " + b"[" * 50_000, "is nested too deeply"),
        (b"a = " + b"{a=" * 50_000, "is nested too deeply"),
        (b"a" + b".a" * 5_000 + b" = 1", "unknown key|nested too deeply"),
        (b"\x00\x1b", "is no TOML"),
        (b"rounds = 99999999999999999999999999", "less than or equal to 1000000000|is no TOML|rounds"),
    ],
    ids=["huge", "empty", "lists", "tables", "dotted", "binary", "rounds"],
)
def test_a_recipe_that_is_none(text: bytes, line: str, made: Loopback) -> None:
    script = Script(text)
    assert re.search(line, ended(made, script))
    assert script.asked == ["knock"]


def test_a_recipe_that_takes_long_to_read(made: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_READING", 0.1)
    script = Script(of(made, data={"classes": [f"{number:x}" for number in range(70_000)]}))
    assert "takes too long to read" in ended(made, script)
    assert script.asked == ["knock"]


@pytest.mark.parametrize("model", [{"name": "mlp", "hidden": [10**9]}, {"name": "mlp", "hidden": [20_000, 20_000]}])
def test_a_network_that_no_device_has_room_for(model: dict[str, Any], made: Loopback) -> None:
    script = Script(of(made, model=model))
    line = ended(made, script, Policy(most_memory_mb=1000))
    assert "most_memory_mb = 1000: getting ready for the recipe of localhost" in line
    assert script.asked == ["knock"]


@pytest.mark.parametrize("kind", ["knock", "hello", "pull", "update"])
def test_an_answer_to_another_question(kind: str, made: Loopback, broadcast: bytes) -> None:
    task = Said(messages.Task(round=0, model="0" * 64), broadcast)
    script = Script(of(made), [task], {kind: messages.Held(size=3)})
    assert "answered 'held'; is it a personafl server?" in ended(made, script)
    if kind == "update":
        assert kept(made).entry is None  # nothing was accepted


def changed(broadcast: bytes, change: Callable[[torch.Tensor], torch.Tensor]) -> bytes:
    return safetensors.torch.save({path: change(leaf) for path, leaf in wire.decode_named(broadcast).items()})


BAD = {
    "no tensors": (lambda leaf: leaf[:0], "BAD_SHAPE"),
    "other shapes": (lambda leaf: leaf[None], "BAD_SHAPE"),
    "other numbers": (lambda leaf: leaf.double(), "BAD_DTYPE"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_broadcast_that_is_none(name: str, made: Loopback, broadcast: bytes) -> None:
    change, code = BAD[name]
    script = Script(of(made), [Said(messages.Task(round=0, model="0" * 64), changed(broadcast, change))])
    assert f"sent what this device refuses: {code}" in ended(made, script)
    assert "update" not in script.asked


def test_a_broadcast_that_is_too_large_or_no_tensors_at_all(made: Loopback, broadcast: bytes) -> None:
    for payload, code in ((broadcast + bytes(10**6), "TOO_LARGE"), (b"\xff" * 100, "BAD_PAYLOAD")):
        script = Script(of(made), [Said(messages.Task(round=0, model="0" * 64), payload)])
        assert f"sent what this device refuses: {code}" in ended(made, script)


@pytest.mark.parametrize("number", tiered([float("nan"), float("inf"), 3e38], [3e38]))
def test_a_model_that_has_diverged_is_outlived_and_the_devices_own_is_not_lost(
    number: float, made: Loopback, broadcast: bytes
) -> None:
    """A good round, a bad one, and a good one again: the state of the first is there in the third."""
    bad = changed(broadcast, lambda leaf: torch.full_like(leaf, number))
    tasks = [
        Said(messages.Task(round=round_, model="0" * 64), payload) for round_, payload in enumerate((broadcast, bad))
    ]
    script = Script(of(made), [*tasks, tasks[1], Said(messages.Finished(rounds=3), bad)])
    line = ended(made, script)
    assert script.asked.count("update") == 1
    assert sum("nothing was sent, and it asks again" in text for text in made.said) == 2
    if number != 3e38:
        assert "the end: the broadcast has numbers that are not finite" in line
    state = kept(made)
    assert (state.rounds, state.pending, state.finished) == ([0], None, False)
    assert state.entry is not None
    assert all(bool(leaf.isfinite().all()) for leaf in state.entry.values() if leaf.is_floating_point())


def test_a_round_beyond_the_recipes_last(made: Loopback, broadcast: bytes) -> None:
    script = Script(of(made), [Said(messages.Task(round=3, model="0" * 64), broadcast)])
    assert "asks for round 4 of 3" in ended(made, script)
    assert "update" not in script.asked


def test_finished_at_once_is_an_end(made: Loopback, broadcast: bytes) -> None:
    script = Script(of(made), [Said(messages.Finished(rounds=3), broadcast)])

    async def whole() -> None:
        async with answering(made.folder / "pki", script) as made.port:
            await made.device("device-0")

    asyncio.run(whole())
    assert any("took part in 0" in text for text in made.said)


@pytest.mark.parametrize("heartbeat", [0.5, 1e-9])
def test_a_server_that_never_has_anything_is_not_asked_all_the_time(
    heartbeat: float, made: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "_LEAST_PAUSE", 3600.0)
    script = Script(of(made, deploy={"heartbeat": heartbeat}))

    async def asked() -> None:
        async with answering(made.folder / "pki", script) as made.port:
            waiting = asyncio.create_task(made.device("device-0"))
            while "pull" not in script.asked:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            waiting.cancel()
            await asyncio.wait([waiting])

    asyncio.run(asked())
    assert script.asked.count("pull") == 1
