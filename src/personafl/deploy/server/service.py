"""A process that answers others and waits for what they bring: what a server and a coordinator have in common.

All that computes or writes is done by one worker thread, one thing at a time.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from personafl.deploy.net.identity import Files, Identity, Revocations
from personafl.deploy.net.listening import serve
from personafl.deploy.net.messages import Code, Message, Part, Refused, Said
from personafl.deploy.net.transport import beating, lasting
from personafl.deploy.server.clock import Clock
from personafl.deploy.server.history import Closed
from personafl.errors import StorageFailed
from personafl.recipe.recipe import Recipe
from personafl.storage.journal import Journal

T = TypeVar("T")
LOST = 3  # heartbeats without a sign of life, after which a peer counts as gone
_LONGEST = 30.0  # seconds between two tries to write to a full disk
MOST_REFUSALS = 10_000  # that are written down and told; more are counted: a hostile peer must not fill the disk
_TICK = 0.2  # seconds between two looks at the clock, and at what is waited for
PATIENCE = 30.0  # seconds to stay for a silent peer at the end: more than its longest back-off


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Where a process listens, who it is, and where its run is kept."""

    recipe: Recipe
    out: Path
    files: Files
    revocations: Path
    listen: str


@dataclass(frozen=True)
class Event:
    """What a display is told.

    `what` is listening, recipe, enrolled, closed, extended, mixed, gone, full, ending, finished, refused, …
    """

    what: str
    text: str
    closed: Closed | None = None

    def __str__(self) -> str:
        if self.closed is None:
            return f"{self.what}: {self.text}"
        loss = "" if self.closed.loss is None else f", loss {self.closed.loss:.4f}"
        return f"round {self.closed.number + 1}: {len(self.closed.taken)} of {self.closed.selected} updates{loss}"


Listener = Callable[[Event], None]


class Bell:
    """Wakes all that wait for it to ring; who waits from now on waits for the next time."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake them."""
        self._rung.set()
        self._rung = asyncio.Event()

    async def within(self, seconds: float, holds: Callable[[], bool]) -> None:
        """Wait until something holds, which can begin to only when this rings, but no longer than so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not holds():
                    await self._rung.wait()


class Service:
    """A process whose peers call it by their number."""

    def __init__(self, config: ServiceConfig, journal: Journal, worker: ThreadPoolExecutor, listener: Listener) -> None:
        self._listening, self._journal, self._worker, self._tell = config, journal, worker, listener
        self._changed = Bell()
        self._clock = Clock()
        self._seen: dict[int, float] = {}  # number -> when it last gave a sign of life
        self._refusals: Counter[str] = Counter()
        self._revocations = Revocations(config.revocations, config.files.authority)
        self._began = time.monotonic()

    async def _answer(self, identity: Identity, said: Said) -> Said:
        """Return what a peer is answered."""
        raise NotImplementedError

    def _allowed(self, identity: Identity, message: Message, part: Part) -> int:
        """Return how large a payload may be that a peer wants to send, or refuse it."""
        raise NotImplementedError

    async def _answered(self, identity: Identity, said: Said) -> Said:
        """Answer a peer; what cannot be written now it may ask for again soon."""
        try:
            return await self._answer(identity, said)
        except StorageFailed as error:
            self._tell(Event("full", str(error)))
            raise Refused(Code.BUSY, "cannot write to the disk now; try again soon") from error

    @contextlib.asynccontextmanager
    async def _serving(self, budget: int) -> AsyncIterator[int]:
        """Answer peers meanwhile; the port is given."""
        config = self._listening
        server, port = await serve(
            config.listen,
            config.files,
            self._revocations,
            self._answered,
            allowed=self._allowed,
            budget=budget,
            on_refusal=self._refused,
        )
        try:
            warned = lasting(config.files, lambda text: self._tell(Event("ending", text)))
            async with beating(_TICK, self._tick), warned:
                yield port
        finally:
            await server.stop(grace=1.0)

    async def _tick(self) -> None:
        self._now()

    def _now(self) -> float:
        """Return the time by which others are late."""
        now, was_away = self._clock.look()
        if was_away:
            self._was_away(now)
        return now

    def _was_away(self, now: float) -> None:
        """Give everybody as much time as if they had just been heard."""
        self._seen = dict.fromkeys(self._seen, now)

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds; it is looked at when anything changes, and now and then."""
        while not holds():
            await self._changed.within(_TICK, holds)

    async def _within(self, seconds: float, holds: Callable[[], bool]) -> None:
        """Wait until something holds, but no longer than this."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._until(holds)

    def _notify(self) -> None:
        """Wake all that wait for a change."""
        self._changed.ring()

    async def _work(self, task: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, task)

    async def _surely(self, task: Callable[[], T]) -> T:
        """Do what the run cannot go on without: while the disk is full, try again now and then."""
        seconds = 0.5
        while True:
            try:
                return await self._work(task)
            except StorageFailed as error:
                self._tell(Event("full", f"{error}; trying again"))
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, _LONGEST)

    def _facts(self, run: Any) -> dict[str, Any]:
        """Return what a report says of any run."""
        return {
            "name": run.recipe.name,
            "method": run.recipe.method.name,
            "rounds": run.recipe.rounds,
            "done": run.done,
            "finished": run.finished,
            "seconds": round(time.monotonic() - self._began, 1),
            "last": None if run.last is None else asdict(run.last),
            "refused": dict(self._refusals),
        }

    def _alive(self, seconds: float) -> set[int]:
        since = self._now() - seconds
        return {number for number, seen in self._seen.items() if seen > since}

    def _refused(self, who: str, refused: Refused) -> None:
        self._refusals[refused.code] += 1
        if sum(self._refusals.values()) <= MOST_REFUSALS:
            facts = {"who": who, "code": refused.code, "text": refused.text[:200]}
            # By the worker, as all lines; if the disk is full, this one is not missed.
            self._worker.submit(self._journal.write, "refused", durable=False, **facts)
            self._tell(Event("refused", f"{who}: {str(refused)[:200]}"))
