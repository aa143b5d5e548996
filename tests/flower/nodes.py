"""A Grid without Flower's processes: nodes answer in this one, and can be lost, replaced and made to lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from personafl.deploy.device.dealing import deal
from personafl.flower import client_app, server_app
from personafl.recipe.recipe import Recipe

__all__ = ["Node", "Nodes"]

Change = Callable[[Message], Message | None]  # an answer -> what arrives of it; None: nothing


def as_it_is(answer: Message) -> Message:
    return answer


@dataclass
class Node:
    """A SuperNode: its client's number and data, and what becomes of its answers."""

    number: int
    data: Path
    state: Path
    change: Change = as_it_is
    key: bytes = b"key"
    activated: str = "1"
    policy: Path | None = None
    asked: list[str] = field(default_factory=list)  # kinds of messages that came


class Nodes(Grid):
    """A federation whose data are dealt to nodes in a folder; `serve` runs the ServerApp."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.folder = folder
        self.recipe, files = deal(recipe, folder / "dealt")
        self.nodes = {
            100 + place: Node(int(file.stem.removeprefix("device-")), file, folder / "nodes" / file.stem)
            for place, file in enumerate(files)
        }
        self.app: ClientApp = client_app()
        self.before_pull: Callable[[], None] = lambda: None
        self._answers: dict[str, Message] = {}
        self._count = 0
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def serve(self, **config: Any) -> None:
        context = Context(1, 1, {}, RecordDict(), {"out": str(self.out), **config})
        server_app(self.folder / "dealt" / "recipe.toml")(self, context)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [
            NodeInfo(node_id=id_, last_activated_at=node.activated, public_key=node.key)
            for id_, node in self.nodes.items()
        ]

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        self._count += 1
        id_ = f"message-{self._count}"
        message.metadata.__dict__["_message_id"] = id_
        node = self.nodes[message.metadata.dst_node_id]
        node.asked.append(message.metadata.message_type)
        config = {"client": node.number, "data": str(node.data), "state": str(node.state), "partition-id": 3}
        config |= {} if node.policy is None else {"policy": str(node.policy)}
        try:
            answer = self.app(message, Context(1, message.metadata.dst_node_id, config, RecordDict(), {}))
        except Exception as error:  # as a SuperNode does
            answer = Message(Error(code=0, reason=f"{type(error)}: {error}"), reply_to=message)
        arrives = node.change(answer)
        if arrives is not None:
            self._answers[id_] = arrives
        return id_

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.before_pull()
        return [self._answers.pop(id_) for id_ in message_ids if id_ in self._answers]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise AssertionError("it sleeps for 3 s")

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise AssertionError("deprecated")

    def set_run(self, run: Any) -> None:
        pass

    @property
    def run(self) -> Any:
        raise AssertionError("not used")
