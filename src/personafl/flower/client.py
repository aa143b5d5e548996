"""A ClientApp: one device of a federation. Flower starts a process for each message; what is kept is kept in files.

A node is told by its operator who it is and where its data and its state are:

    flower-supernode … --node-config 'client=7 data="mine.npz" state="/var/lib/personafl"'

The state of each run has a folder of its own in `state`; Flower's own `context.state` is lost when a node restarts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from flwr.app import Context
from flwr.app import Message as Envelope
from flwr.clientapp import ClientApp
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from personafl.deploy.device.policy import Policy
from personafl.deploy.device.serving import keep_best
from personafl.deploy.device.state import DeviceState
from personafl.deploy.device.training import LocalClient
from personafl.deploy.net.messages import Code, Finished, Left, Refused, Said, Task
from personafl.errors import BadInput
from personafl.flower.messages import Call, Fate, Present, Trained, has, pack, unpack

_RECIPE_BYTES = 2**20


class _NodeConfig(BaseModel):
    """What the operator of a node says; keys for other apps are left alone."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", frozen=True)

    client: Annotated[int, Field(ge=0)]  # its number: random draws come from it
    data: str
    state: Path
    profile: str | None = None
    policy: Path | None = None  # what it agrees to, as `personafl device --policy`

    @classmethod
    def read(cls, values: Mapping[str, object]) -> _NodeConfig:
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            first = error.errors()[0]
            wanted = """--node-config 'client=7 data="mine.npz" state="/var/lib/personafl"'"""
            raise BadInput(f"--node-config: {first['loc'][0]}: {first['msg']}; it is given as {wanted}") from error


def client_app() -> ClientApp:
    """Return the app of a node: it joins, trains, and keeps its model."""
    app = ClientApp()
    app.query()(_answer)
    app.train()(_answer)
    app.query("finish")(_answer)
    return app


def _answer(message: Envelope, context: Context) -> Envelope:
    content = message.content
    call, text = unpack(content, Call)
    client, folder = _ready(_NodeConfig.read(context.node_config), call.run, text)
    if has(content, Fate):
        _settle(client.state, unpack(content, Fate)[0])
    if has(content, Task):
        reply = _trained(client, *unpack(content, Task))
    elif has(content, Finished):
        reply = _kept(client, folder, unpack(content, Finished)[1])
    else:
        reply = _joined(client)
    return Envelope(pack(reply), reply_to=message)


def _ready(node: _NodeConfig, run: str, text: bytes) -> tuple[LocalClient, Path]:
    if len(text) > _RECIPE_BYTES:
        raise Refused(Code.TOO_LARGE, f"a recipe may have {_RECIPE_BYTES} bytes")
    folder, whose = node.state.expanduser() / run, "the recipe of the ServerApp"
    policy = Policy() if node.policy is None else Policy.read(node.policy.expanduser())
    return LocalClient.opened(text, whose, node.data, node.client, node.profile, folder, run, policy), folder


def _joined(client: LocalClient) -> Said:
    known, pending = client.state.known, client.state.pending
    waiting = pending.round if pending is not None and pending.state else None
    return Said(Present(number=client.number, returning=known, pending=waiting, **client.hello))


def _settle(state: DeviceState, fate: Fate) -> None:
    """Learn what became of the pending update: none of a round that is still open is settled."""
    if state.pending is None:
        return
    if state.pending.round == fate.taken:
        state.accepted()
    elif state.pending.round < fate.rounds:
        state.refused()


def _trained(client: LocalClient, task: Task, broadcast: bytes) -> Said:
    """Train; a task that comes again, because its answer was lost, is answered as before."""
    _check_size(client, broadcast)
    before = client.state.pending
    if before is None or (before.round, before.model) != (task.round, task.model):
        client.train(task.round, task.model, broadcast)
    pending = client.state.pending
    assert pending is not None
    update = Trained(round=task.round, model=task.model, samples=client.samples, returning=bool(pending.state))
    return Said(update, pending.update)


def _kept(client: LocalClient, folder: Path, broadcast: bytes) -> Said:
    """Choose and keep a model; a node that has done so has nothing to do."""
    if not client.state.finished:
        _check_size(client, broadcast)
        client.receive(broadcast)
        kept = client.guard.run(lambda: keep_best(client, folder), "choosing a model")
        client.state.finish()
        print(f"client {client.number} keeps its {kept.name} model in {kept.file}", flush=True)
    return Said(Left())


def _check_size(client: LocalClient, broadcast: bytes) -> None:
    if len(broadcast) > client.broadcast_bytes:
        raise Refused(Code.TOO_LARGE, f"a broadcast may have {client.broadcast_bytes} bytes")
