"""gRPC with mutual TLS: one method, `Exchange`, a message each way. Used by every pair of machines.

serve(handle, …)        answers peers; `handle(identity, said)` returns what to say, or raises `Refused`
Channel(…).ask(message) asks a server, over broken connections and restarts, until it answers
"""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from personafl.deploy.net import messages
from personafl.deploy.net.identity import Files, Identity, Revocations, identify
from personafl.deploy.net.messages import Code, Message, Part, Refused, Said, digest_of
from personafl.deploy.net.stream import FRAME_BYTES, Cap, Partials, frames, receive
from personafl.errors import BadInput

Handle = Callable[[Identity, Said], Awaitable[Said]]
OnRefusal = Callable[[str, Refused], None]  # (whose message, why): for the log

_SERVICE, _METHOD = "personafl.v1.Peer", "Exchange"
_LIMITS = [("grpc.max_receive_message_length", FRAME_BYTES), ("grpc.max_send_message_length", FRAME_BYTES)]
_KEEP_ALIVE = [("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 10_000)]


class Unreachable(Exception):
    """The server did not answer for as long as the caller wanted to try."""


async def serve(
    address: str,
    files: Files,
    revocations: Revocations,
    handle: Handle,
    *,
    cap: Cap,
    budget: int,
    on_refusal: OnRefusal,
) -> tuple[grpc.aio.Server, int]:
    """Start to answer peers at an address; return the server and its port.

    `cap` bounds a payload by the kind of its message, `budget` all payloads that are on their way in.
    """
    partials = Partials(budget)

    async def exchange(incoming: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        who, have = "unknown", None
        try:
            identity = _caller(context)
            who = identity.name
            revocations.check(identity)
            message, envelope, payload = await receive(incoming, who, partials, cap)
            have = envelope.have
            if isinstance(message, messages.Have):
                reply = Said(messages.Held(size=partials.size(who, message.digest)))
            else:
                reply = await handle(identity, Said(message, payload))
        except Refused as refused:
            on_refusal(who, refused)
            reply = Said(messages.Refusal(code=refused.code, text=refused.text[:2000]))
        for frame in frames(reply, offset=_agreed(reply, have)):
            yield frame

    server = grpc.aio.server(options=[*_LIMITS, ("grpc.so_reuseport", 0)])
    handlers = {_METHOD: grpc.stream_stream_rpc_method_handler(exchange)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    pair = (files.key.read_bytes(), files.certificate.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], files.authority.read_bytes(), require_client_auth=True)
    try:
        port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise BadInput(f"--listen {address}: cannot be listened at; is another server running there?") from error
    await server.start()
    return server, port


def _caller(context: Any) -> Identity:
    shown = context.auth_context().get("x509_pem_cert", ())
    if len(shown) != 1:
        raise Refused(Code.NO_CERTIFICATE, "no certificate was shown")
    return identify(shown[0])


def _agreed(reply: Said, have: Part | None) -> int:
    """Return from where on to send a reply's payload: the peer may have the beginning."""
    if have is None or not reply.payload or have.offset > len(reply.payload):
        return 0
    return have.offset if have.digest == digest_of(reply.payload) else 0


class Channel:
    """A connection to a server; one question at a time goes out with a payload."""

    def __init__(self, address: str, files: Files, cap: Cap, on_retry: Callable[[str], None] | None = None) -> None:
        credentials = grpc.ssl_channel_credentials(
            files.authority.read_bytes(), files.key.read_bytes(), files.certificate.read_bytes()
        )
        patience = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 5_000)]
        self._channel = grpc.aio.secure_channel(address, credentials, options=[*_LIMITS, *_KEEP_ALIVE, *patience])
        self._method = self._channel.stream_stream(f"/{_SERVICE}/{_METHOD}")
        self._address, self._cap, self._on_retry = address, cap, on_retry
        self._partials = Partials(2**62)  # what a reply may take is bounded by `cap`

    async def close(self) -> None:
        """Hang up."""
        await self._channel.close()

    async def ask(self, message: Message, payload: bytes = b"", *, timeout: float = 120.0, tries: int = 0) -> Said:
        """Say something and return the answer; raise `Refused` if it is refused.

        A broken connection or a busy server is tried again with back-off, `tries` times; 0: for ever. What was sent or
        received before it broke is not sent again.
        """
        attempt = 0
        while True:
            try:
                offset = await self._held(payload, timeout) if payload and attempt else 0
                return await self._once(Said(message, payload), offset, timeout)
            except (TimeoutError, grpc.aio.AioRpcError, OSError) as error:
                reason: object = error.details() if isinstance(error, grpc.aio.AioRpcError) else "no answer in time"
            except Refused as refused:
                if refused.code not in (Code.BUSY, Code.INCOMPLETE, Code.BAD_OFFSET):
                    raise
                reason = refused
            attempt += 1
            if attempt == tries:
                raise Unreachable(f"{self._address}: {reason}")
            if self._on_retry is not None and attempt & (attempt - 1) == 0:  # the 1st, 2nd, 4th, … time
                self._on_retry(f"{self._address} does not answer ({reason}); trying again")
            # Full jitter: devices that lost one server must not come back all at once.
            await asyncio.sleep(random.uniform(0, min(10.0, 0.1 * 2 ** min(attempt, 10))))

    async def _held(self, payload: bytes, timeout: float) -> int:
        answer, _ = await self._once(Said(messages.Have(digest=digest_of(payload))), 0, timeout)
        return answer.size if isinstance(answer, messages.Held) else 0

    async def _once(self, said: Said, offset: int, timeout: float) -> Said:
        part = self._partials.newest(said.message.kind)
        call = self._method(timeout=timeout)
        try:
            for frame in frames(said, part, offset):
                await call.write(frame)
            await call.done_writing()
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            pass  # the server may have answered before the end, to refuse: see what it says
        message, _, payload = await receive(_read(call), said.message.kind, self._partials, self._cap)
        with contextlib.suppress(grpc.aio.AioRpcError):
            call.cancel()
        if isinstance(message, messages.Refusal):
            raise Refused(message.code, message.text)
        return Said(message, payload)


async def _read(call: Any) -> AsyncIterator[bytes]:
    while (frame := await call.read()) is not grpc.aio.EOF:
        yield frame


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
