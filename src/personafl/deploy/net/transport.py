"""gRPC with mutual TLS: one method, `Exchange`, a message each way. Used by every pair of machines.

Channel(…).ask(message) asks a server, over broken connections and restarts, until it answers; `listening` is that end.
"""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from personafl.deploy.net import messages
from personafl.deploy.net.identity import Files
from personafl.deploy.net.messages import Code, Message, Payload, Refused, Said
from personafl.deploy.net.renewal import DAY, Own, check_lasting, warn
from personafl.deploy.net.stream import FRAME_BYTES, Partials, frames, receive
from personafl.errors import BadInput

Cap = Callable[[str], int]  # kind of message -> most bytes of its payload
SERVICE, METHOD = "personafl.v1.Peer", "Exchange"
CALL_SECONDS = 120.0  # of one call at most; what is not through by then is continued in another
OPTIONS = [
    ("grpc.max_receive_message_length", FRAME_BYTES),
    ("grpc.max_send_message_length", FRAME_BYTES),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: what is small on the way must not be large here
]
_OPTIONS = [
    *OPTIONS,
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5_000),
]


class Unreachable(Exception):
    """The server did not answer for as long as the caller wanted to try."""


class Channel:
    """A connection to a server; one question at a time goes out with a payload."""

    def __init__(self, address: str, files: Files, cap: Cap, on_retry: Callable[[str], None] | None = None) -> None:
        self.address, self._cap, self._on_retry = address, cap, on_retry
        self._own = Own(files)
        self._channel = self._opened()
        self.answered: float | None = None  # when the server last did
        self._parting: set[asyncio.Task[None]] = set()
        self._lost: float | None = None  # when the server was first found not to answer; None: it does
        self._partials = Partials(2**62)  # what a reply may take is bounded by `cap`

    @property
    def silence(self) -> float:
        """For how many seconds nothing has got through to the server; 0: something has, or nothing was asked."""
        return 0.0 if self._lost is None else time.monotonic() - self._lost

    async def close(self) -> None:
        """Hang up."""
        for task in self._parting:
            task.cancel()
        await self._channel.close()

    async def ask(
        self, message: Message, payload: bytes = b"", *, timeout: float = CALL_SECONDS, tries: int = 0
    ) -> Said:
        """Say something and return the answer; raise `Refused` if it is refused.

        A broken connection or a busy server is tried again with back-off, `tries` times; 0: for ever. What was sent or
        received before it broke is not sent again.
        """
        attempt, sent = 0, Payload(payload)
        while True:
            self._renew()
            try:
                offset = await self._held(sent, timeout) if sent and attempt else 0
                return await self._once(Said(message, sent), offset, timeout)
            except (TimeoutError, grpc.aio.AioRpcError, OSError) as error:
                reason = self._reason(error)
                self._lost = time.monotonic() if self._lost is None else self._lost
            except Refused as refused:
                if refused.code not in (Code.BUSY, Code.INCOMPLETE, Code.BAD_OFFSET):
                    raise
                reason = str(refused)
            attempt += 1
            if attempt == tries:
                raise Unreachable(f"{self.address}: {reason}")
            if self._on_retry is not None and attempt & (attempt - 1) == 0:  # the 1st, 2nd, 4th, … time
                self._on_retry(f"{self.address} does not answer ({reason}); trying again")
            # Full jitter: devices that lost one server must not come back all at once.
            await asyncio.sleep(random.uniform(0, min(10.0, 0.1 * 2 ** min(attempt, 10))))

    def _reason(self, error: Exception) -> str:
        """Return why there was no answer; a certificate of one's own that has ended is no matter of trying again."""
        if (text := self._own.ended()) is not None:
            raise Refused(Code.EXPIRED, text)
        reason = str(error.details()) if isinstance(error, grpc.aio.AioRpcError) else "no answer in time"
        if "certificate has expired" in reason:
            return "the server's certificate has ended; whoever runs it renews it with personafl pki issue"
        return reason

    def _opened(self) -> grpc.aio.Channel:
        key, certificate, authority = self._own.pems
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        return grpc.aio.secure_channel(self.address, credentials, options=_OPTIONS)

    def turn_to(self, address: str) -> None:
        """Ask another server from now on."""
        self.address, self._partials = address, Partials(2**62)
        self._reopen()

    def _renew(self) -> None:
        """Connect anew if the certificate was renewed."""
        if self._own.renewed():
            self._reopen()

    def _reopen(self) -> None:
        """Connect anew; calls that are under way may end."""
        task = asyncio.create_task(self._channel.close(grace=CALL_SECONDS))
        self._parting.add(task)
        task.add_done_callback(self._parting.discard)
        self._channel = self._opened()

    async def _held(self, payload: Payload, timeout: float) -> int:
        answer, _ = await self._once(Said(messages.Have(digest=payload.digest)), 0, timeout)
        return answer.size if isinstance(answer, messages.Held) else 0

    async def _once(self, said: Said, offset: int, timeout: float) -> Said:
        part = self._partials.newest(said.message.kind)
        call = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")(timeout=timeout)
        arriving = receive(_read(call), said.message.kind, self._partials, lambda message, _: self._cap(message.kind))
        reading = asyncio.create_task(arriving)  # meanwhile: the server may answer before the end, to refuse
        try:
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # see what it says
                for frame in frames(said, part, offset):
                    if reading.done():
                        break
                    await call.write(frame)
                else:
                    await call.done_writing()
            message, _, payload = await reading
            self.answered, self._lost = time.monotonic(), None
        finally:
            call.cancel()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        if isinstance(message, messages.Refusal):
            raise Refused(message.code, message.text, by_peer=True)
        return Said(message, payload)


async def _read(call: Any) -> AsyncIterator[bytes]:
    """Yield the frames of an answer; one that breaks ends there, for what came of it counts."""
    frame = await call.read()
    with contextlib.suppress(grpc.aio.AioRpcError):
        while frame is not grpc.aio.EOF:
            yield frame
            frame = await call.read()


@contextlib.asynccontextmanager
async def beating(seconds: float, beat: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Give a sign of life every so many seconds meanwhile."""

    async def repeat() -> None:
        while True:
            await asyncio.sleep(seconds)
            await beat()

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Refused):
            await task


@contextlib.asynccontextmanager
async def lasting(files: Files, tell: Callable[[str], None]) -> AsyncIterator[None]:
    """Fail if a machine's certificate has ended; meanwhile say it, now and every day, if it ends soon."""
    check_lasting(files)

    async def warned() -> None:
        warn(files, tell)

    await warned()
    async with beating(DAY, warned):
        yield


async def ask_status(server: str, files: Files) -> dict[str, Any]:
    """Return how a server is doing."""
    channel = Channel(server, files, lambda kind: 2**24 if kind == messages.Report.kind else 0)
    try:
        _, report = await channel.ask(messages.Status(), timeout=10.0, tries=3)
    except (Refused, Unreachable) as error:
        raise BadInput(f"--server {server}: {error}") from error
    finally:
        await channel.close()
    return json.loads(report)  # type: ignore[no-any-return]
