"""Which of several servers has a device: it looks for that one at the start, and when its own does not answer.

A device of a cloud belongs to one server. When that is dropped, another one has it, and says so when it is knocked at;
all others refuse it. So a device may knock anywhere, and nobody has to tell it where to go.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from personafl.deploy.device.state import DeviceState
from personafl.deploy.net.identity import Files
from personafl.deploy.net.messages import Code, Knock, Refused, Said, Welcome
from personafl.deploy.net.transport import Cap, Channel, Unreachable
from personafl.errors import BadInput

_KNOCK = 10.0  # seconds that a server has to answer
_FIRST, _LONGEST = 1.0, 60.0  # seconds of silence after which a device looks around, and between two looks at most


class Elsewhere(Exception):
    """Another server has this device now; it was turned to."""


class Homes:
    """The servers that may have a device, whose state is in a directory."""

    def __init__(self, server: str, files: Files, cap: Cap, state: Path, tell: Callable[[str, str], None]) -> None:
        self._addresses = [address.strip() for address in server.split(",")]
        if not all(self._addresses):
            raise BadInput(f"--server {server}: give HOST:PORT, or several with commas between them")
        self._files, self._cap, self._state, self._tell = files, cap, state, tell
        self.channel = Channel(self._addresses[0], files, cap, lambda text: tell(text, "waiting"))

    async def find(self) -> None:
        """Turn to the server that has this device; with one address that is the one."""
        pause = 0.0
        while len(self._addresses) > 1:
            refusals: list[Refused] = []
            if await self._turned(self._addresses, refusals):
                return
            if len(refusals) == len(self._addresses):
                raise next((one for one in refusals if one.code is not Code.WRONG_SERVER), refusals[0])
            pause = min(2 * pause + _FIRST, _LONGEST)
            self._tell(f"no server of {', '.join(self._addresses)} has this device; looking again", "waiting")
            await asyncio.sleep(random.uniform(0, pause))

    async def meanwhile(self, question: Coroutine[Any, Any, Said]) -> Said:
        """Return the answer to a question; while there is none, see whether another server has this device by now."""
        if len(self._addresses) == 1:
            return await question
        asking, due = asyncio.create_task(question), _FIRST
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=_FIRST)
                if asking.done() or self.channel.silence < due:
                    continue
                due = self.channel.silence + min(due, _LONGEST)
                if await self._turned([one for one in self._addresses if one != self.channel.address], []):
                    raise Elsewhere
            return asking.result()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    def is_home(self, welcome: Welcome) -> bool:
        """Say whether a server has this device, and not merely had it before."""
        kept = DeviceState.home_of(self._state)
        if kept is None:
            return True
        return welcome.run == kept[0] and (welcome.moved is not None or (welcome.home or welcome.run) == kept[1])

    async def _turned(self, addresses: list[str], refusals: list[Refused]) -> bool:
        """Turn to the first of some servers that has this device, if one has; and note who refuses it."""
        for address in addresses:
            channel = Channel(address, self._files, self._cap)
            try:
                welcome, _ = await channel.ask(Knock(), timeout=_KNOCK, tries=1)
            except Unreachable:
                continue
            except Refused as refused:
                refusals.append(refused)
                continue
            finally:
                await channel.close()
            if not isinstance(welcome, Welcome) or not self.is_home(welcome):
                refusals.append(Refused(Code.WRONG_SERVER, f"{address} does not have this device"))
                continue
            if address != self.channel.address:
                self._tell(f"turns to {address}", "turned")
                self.channel.turn_to(address)
            return True
        return False
