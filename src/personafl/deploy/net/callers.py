"""How much each identity may ask for: so many calls at a time, so many a second, large ones for more than one.

Who asks for more waits.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass

from personafl.deploy.net.messages import Code, Refused

AT_ONCE = 16  # calls of one identity; a device has two or three, and for a while those that its last address left
RATE, BURST = 20.0, 100  # calls a second, and how many may come at once after a pause
_BYTES = 2**14  # of an answer that anyone may ask for, which count as another call
_PAUSE = 1.0  # seconds that one call too many is kept waiting before it is refused


@dataclass
class _Caller:
    calls: int = 0
    due: float = 0.0  # when its calls so far would be through, at its rate

    def delay(self, now: float) -> float:
        """Count a call; return for how many seconds it has to wait."""
        self.due = max(self.due, now - BURST / RATE) + 1 / RATE
        return max(0.0, self.due - now)


class Callers:
    """Who is calling, and how often."""

    def __init__(self) -> None:
        self._of: defaultdict[str, _Caller] = defaultdict(_Caller)

    def weigh(self, who: str, size: int) -> None:
        """Count so many bytes that somebody is answered."""
        self._of[who].due += size / _BYTES / RATE

    @contextlib.asynccontextmanager
    async def calling(self, who: str) -> AsyncIterator[None]:
        """Let a call of somebody begin when it may; refuse it if too many others are not done."""
        caller = self._of[who]
        if caller.calls >= AT_ONCE:
            await asyncio.sleep(_PAUSE)
            raise Refused(Code.BUSY, f"{who} has {AT_ONCE} calls that are not done")
        caller.calls += 1
        try:
            if (delay := caller.delay(asyncio.get_running_loop().time())) > 0:
                await asyncio.sleep(delay)
            yield
        finally:
            caller.calls -= 1
