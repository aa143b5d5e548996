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

from personafl.deploy.net.exposition import Metric, gauge, info, rendered
from personafl.deploy.net.identity import Files, Identity, Revocations, identify
from personafl.deploy.net.listening import serve
from personafl.deploy.net.messages import Code, Heard, Message, Part, Refused, Said
from personafl.deploy.net.renewal import Own
from personafl.deploy.net.scraping import scraped
from personafl.deploy.net.telling import Told
from personafl.deploy.net.transport import beating, lasting
from personafl.deploy.server.clock import Clock
from personafl.deploy.server.history import Closed
from personafl.deploy.server.tally import Tallied
from personafl.errors import StorageFailed
from personafl.recipe.recipe import Recipe

T = TypeVar("T")
LOST = 3  # heartbeats without a sign of life, after which a peer counts as gone
_LONGEST = 30.0  # seconds between two tries to write to a full disk
MOST_REFUSALS = 10_000  # that are written down and told; more are counted: a hostile peer must not fill the disk
_TICK = 0.2  # seconds between two looks at the clock, and at what is waited for
_STUCK = 60.0  # seconds without a tick, after which a process does not answer
_COUNTED = 60.0  # seconds between two lines that count refusals
PATIENCE = 30.0  # seconds to stay for a silent peer at the end: more than its longest back-off


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Where a process listens, who it is, and where its run is kept."""

    recipe: Recipe
    out: Path
    files: Files
    revocations: Path
    listen: str
    metrics: str | None = None  # HOST:PORT of the pages for operators


@dataclass(frozen=True)
class Event(Told):
    """What a display is told.

    `what` is listening, recipe, enrolled, closed, extended, mixed, gone, full, ending, finished, refused, …
    """

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

    def __init__(self, config: ServiceConfig, run: Tallied, worker: ThreadPoolExecutor, listener: Listener) -> None:
        self._listening, self._journal, self._worker, self._tell = config, run.journal, worker, listener
        self._tally = run.tally
        self._changed = Bell()
        self._clock = Clock()
        self._seen: dict[int, float] = {}  # number -> when it last gave a sign of life
        self._refusals: Counter[str] = Counter(run.tally.refused)
        self._uncounted: Counter[str] = Counter()  # refusals that have no line, and are not in a line of many yet
        self._counted = time.monotonic()  # when such a line was last written
        self._ticked, self._looked = time.monotonic(), 0.0  # when it last was at work; and by its own clock
        self._full = 0  # things that wait for space on the disk
        self._is_up = False  # peers can call
        self._revocations = Revocations(config.revocations, config.files.authority)
        self._began, self._since = time.monotonic(), time.time()

    async def _answer(self, identity: Identity, said: Heard) -> Said:
        """Return what a peer is answered."""
        raise NotImplementedError

    def _allowed(self, identity: Identity, message: Message, part: Part) -> int:
        """Return how large a payload may be that a peer wants to send, or refuse it."""
        raise NotImplementedError

    async def _answered(self, identity: Identity, said: Heard) -> Said:
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
        pages = {"/metrics": self._metrics, "/healthz": self._health, "/readyz": self._readiness}
        async with scraped(config.metrics, pages) as metrics:
            server, port = await serve(
                config.listen,
                config.files,
                self._revocations,
                self._answered,
                allowed=self._allowed,
                budget=budget,
                on_refusal=self._refused,
            )
            if metrics is not None:
                self._tell(Event("metrics", f"port {metrics}: /metrics, /healthz and /readyz"))
            try:
                warned = lasting(config.files, lambda text: self._tell(Event("ending", text)))
                async with beating(_TICK, self._tick), warned:
                    self._is_up = True
                    yield port
            finally:
                self._is_up = False
                self._worker.submit(self._count_refusals)
                await server.stop(grace=1.0)

    async def _tick(self) -> None:
        self._looked, self._ticked = self._now(), time.monotonic()
        if time.monotonic() > self._counted + _COUNTED:
            self._counted = time.monotonic()
            self._worker.submit(self._count_refusals)

    def _gauges(self) -> list[Metric]:
        """Return what there is now, beside what the journal counts."""
        raise NotImplementedError

    def _metrics(self) -> tuple[int, str]:
        gauges = [
            gauge("disk_full", "Whether something waits for space on the disk.", bool(self._full)),
            gauge("start_time_seconds", "When this process began to serve.", self._since),
        ]
        with contextlib.suppress(OSError, Refused):  # it is being renewed
            ends = identify(self._listening.files.certificate.read_bytes()).ends
            gauges.append(gauge("certificate_end_seconds", "When its certificate ends.", ends.timestamp()))
        return 200, rendered([*self._tally.metrics(), *self._gauges(), *gauges])

    def _health(self) -> tuple[int, str]:
        """Say whether the process answers at all: pages have a thread of their own."""
        return (200, "ok\n") if time.monotonic() < self._ticked + _STUCK else (503, "stands still\n")

    def _readiness(self) -> tuple[int, str]:
        """Say whether peers can call: it listens, and its certificate has not ended."""
        if not self._is_up:
            return 503, "starts, or ends\n"
        ended = Own(self._listening.files).ended()
        return (200, "ready\n") if ended is None else (503, f"{ended}\n")

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
        try:
            return await self._work(task)
        except StorageFailed as error:
            self._tell(Event("full", f"{error}; trying again"))
        self._full, since = self._full + 1, time.monotonic()
        try:
            result = await self._again(task)
        finally:
            self._full -= 1
        self._worker.submit(self._journal.write, "waited", durable=False, seconds=round(time.monotonic() - since, 3))
        return result

    async def _again(self, task: Callable[[], T]) -> T:
        seconds = 0.5
        while True:
            await asyncio.sleep(seconds)
            try:
                return await self._work(task)
            except StorageFailed as error:
                self._tell(Event("full", f"{error}; trying again"))
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
        return self._heard_since(self._now() - seconds)

    def _heard_since(self, when: float) -> set[int]:
        return {number for number, seen in list(self._seen.items()) if seen > when}

    def _refused(self, who: str, refused: Refused) -> None:
        self._refusals[refused.code] += 1
        told = sum(self._refusals.values()) <= MOST_REFUSALS
        facts = {"who": who, "code": refused.code, "text": refused.text[:200], **refused.about}
        self._worker.submit(self._note_refusal, facts if told else {"code": refused.code})  # as all that is written
        if told:
            self._tell(Event("refused", f"{who}: {str(refused)[:200]}", who, refused.about.get("round")))

    def _note_refusal(self, facts: dict[str, Any]) -> None:
        """Write a refusal down; those without a name, and on a full disk, are counted."""
        try:
            if "who" in facts:
                self._journal.write("refused", durable=False, **facts)
                return
        except StorageFailed:
            pass
        self._uncounted[facts["code"]] += 1

    def _count_refusals(self) -> None:
        """Write down how many there were that have no line of their own."""
        if self._uncounted:
            self._journal.write("refusals", durable=False, codes=dict(self._uncounted))
            self._uncounted.clear()


def run_gauges(run: Any) -> list[Metric]:
    """Return what can be said of any run now."""
    return [
        info("run", "What is run.", name=run.recipe.name, method=run.recipe.method.name),
        gauge("rounds_planned", "Rounds of the recipe.", run.recipe.rounds),
        gauge("rounds_done", "Rounds that are done, and were not taken back.", run.done),
        gauge("finished", "Whether all rounds are done.", run.finished),
    ]
