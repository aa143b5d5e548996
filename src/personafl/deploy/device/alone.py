"""Training without contact, where a method's rule says how: as the recipe has it, or because nobody answers."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import torch

from personafl.core import tree
from personafl.deploy.device.datafile import ME
from personafl.deploy.device.state import Entry
from personafl.deploy.device.training import LocalClient
from personafl.deploy.net.messages import Finished, Message, Said, Task, Wait
from personafl.deploy.net.transport import Channel
from personafl.errors import Diverged

_LOOK = 1.0  # seconds between two looks at whether the server answers, at most
Tell = Callable[[str], None]
Patiently = Callable[[Callable[[], bool], Callable[[], bool]], Awaitable[bool]]  # does what ends with writing


class Alone:
    """What a device trains alone. Its rounds go on from the last that it knows of, up to the recipe's last."""

    def __init__(self, client: LocalClient) -> None:
        self._client, self._state = client, client.state
        self._still: Entry | None = None  # the state that training alone did not change: the method waits in it

    @property
    def next(self) -> int | None:
        """The round that it may train now; None: it waits, or has nothing to train yet."""
        newest, following = self._state.newest, self._state.reached + 1
        waits = not newest or newest is self._still or following >= self._client.recipe.rounds
        return None if waits else following

    def train(self, round_: int) -> bool:
        """Train for a round; return whether that changed anything."""
        client, before = self._client, self._state.newest
        assert before is not None
        trained = client.guard.run(lambda: self._trained(round_), f"training alone in round {round_ + 1}")
        after = {path: leaf.cpu().contiguous() for path, leaf in trained.items()}
        if all(torch.equal(leaf, before[path]) for path, leaf in after.items()):
            self._still = before
            return False
        self._state.went_on(round_, after)
        return True

    def _trained(self, round_: int) -> Entry:
        ((_, states),) = self._client.side.train_offline(np.array([ME]), round_)
        return tree.flatten(tree.take(states, 0))

    def wait(self) -> None:
        """Train nothing more until the next contact."""
        self._still = self._state.newest


class OnItsOwn:
    """A device that trains alone while its server cannot be reached, and when its server says so."""

    def __init__(
        self, client: LocalClient, channel: Channel, patiently: Patiently, tell: Callable[[str], None]
    ) -> None:
        section = client.recipe.deploy
        assert section is not None
        self._alone, self._state, self._seconds = Alone(client), client.state, section.offline_after
        self._channel, self._patiently, self._tell = channel, patiently, tell

    async def meanwhile(self, question: Coroutine[Any, Any, Said]) -> Said:
        """Return the answer to a question; until it is there train a round now and then, if the server is away."""
        asking, trained = asyncio.create_task(question), 0
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=min(_LOOK, self._seconds / 4))
                round_ = self._alone.next
                if round_ is not None and self._channel.silence > (trained + 1) * self._seconds:
                    trained += 1
                    await self._train(round_)
            return asking.result()
        finally:
            asking.cancel()

    async def catch_up(self, said: Message) -> None:
        """Train the rounds that the server says, if that has not been done."""
        for round_ in said.alone if isinstance(said, Wait | Task | Finished) else ():
            if (first := self._alone.next) is not None and first <= round_:
                await self._train(round_)

    async def _train(self, round_: int) -> None:
        def written() -> bool:
            self._state.write()
            return True

        try:
            if await self._patiently(lambda: self._alone.train(round_), written):
                self._tell(f"round {round_ + 1}: trained without contact")
        except Diverged as problem:
            self._alone.wait()
            self._tell(f"{problem}; it waits for its server")
