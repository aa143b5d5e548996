"""The answering end of the transport: who gets in, and how much of this machine each may take.

Before anyone is known, connections are counted, and have seconds for their handshake; some file descriptors are always
left for what the process writes. Who is known by a certificate has so many calls (`callers`), and a payload (`stream`).
"""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from personafl.deploy.net import messages
from personafl.deploy.net.callers import AT_ONCE, Callers
from personafl.deploy.net.identity import Files, Identity, Revocations, identify
from personafl.deploy.net.messages import Code, Heard, Message, Part, Refused, Said, digest_of
from personafl.deploy.net.renewal import Own
from personafl.deploy.net.stream import Partials, frames, receive
from personafl.deploy.net.transport import CALL_SECONDS, METHOD, OPTIONS, SERVICE
from personafl.errors import BadInput

Handle = Callable[[Identity, Heard], Awaitable[Said]]
Allowed = Callable[[Identity, Message, Part], int]  # most bytes of the payload that somebody wants to send
OnRefusal = Callable[[str, Refused], None]  # (whose message, why): for the log

_RESERVE = 64  # file descriptors for the journal, updates and checkpoints, and for connections that are being refused
_FILES = 2**16  # as many as are used where the system allows it
_HEADER_SECONDS = 10.0
_SENDING = 32  # payloads of answers that are sent at the same time
_PROMPT = 1.0  # seconds after which one that is not through is not counted among them
_ROOM_SECONDS = 10.0  # that whoever is next to send a payload waits for room
_OPTIONS = [
    *OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 20_000),  # without a call
    ("grpc.max_concurrent_streams", AT_ONCE),  # of a connection
    ("grpc.max_metadata_size", 8 * 2**10),
    ("grpc.experimental.tcp_max_read_buffer_size", 8 * 2**10),  # which a connection keeps; else as large as ever came
    ("grpc.http2.bdp_probe", 0),  # else each sender that waits for its turn has a whole chunk in memory here
    ("grpc.keepalive_time_ms", 10_000),  # finds connections whose other end is gone
    ("grpc.keepalive_timeout_ms", 10_000),
]


async def serve(
    address: str,
    files: Files,
    revocations: Revocations,
    handle: Handle,
    *,
    allowed: Allowed,
    budget: int,
    on_refusal: OnRefusal,
) -> tuple[grpc.aio.Server, int]:
    """Start to answer peers at an address; return the server and its port.

    `handle(identity, said)` returns what to say, or raises `Refused`. `allowed` says who may send which payload, or
    refuses it before it is read; `budget` bounds all payloads that are on their way in.
    """
    answers = _Answers(revocations, handle, allowed, Partials(budget, _ROOM_SECONDS), on_refusal)
    own = Own(files)
    server = grpc.aio.server(options=[*_OPTIONS, ("grpc.max_allowed_incoming_connections", _connections(address))])
    handlers = {METHOD: grpc.stream_stream_rpc_method_handler(answers.exchange)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    # Asked for at every handshake, so that a renewed certificate needs no restart.
    credentials = grpc.dynamic_ssl_server_credentials(
        _configured(own), lambda: _configured(own) if own.renewed() else None, require_client_authentication=True
    )
    try:
        port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise BadInput(f"--listen {address}: cannot be listened at; is another server running there?") from error
    await server.start()
    return server, port


@dataclass
class _Answers:
    """What peers are answered, one call after another and side by side."""

    revocations: Revocations
    handle: Handle
    allowed: Allowed
    partials: Partials
    on_refusal: OnRefusal
    callers: Callers = field(default_factory=Callers)
    sending: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_SENDING))

    async def exchange(self, incoming: AsyncIterator[bytes], context: Any) -> None:
        """Answer a call, within its time."""
        who = "unknown"
        try:
            identity = _caller(context)
            who = identity.name
            async with self.callers.calling(who):
                try:
                    async with asyncio.timeout(CALL_SECONDS):
                        await self._converse(identity, incoming, context)
                except TimeoutError:  # this may wait for who does not read, and counts as a call until then
                    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "it took too long")
        except Refused as refused:
            await self._refuse(who, refused, context)

    async def _converse(self, identity: Identity, incoming: AsyncIterator[bytes], context: Any) -> None:
        try:
            self.revocations.check(identity)
            reply, have = await self._answer(identity, incoming)
        except Refused as refused:
            await self._refuse(identity.name, refused, context)
            return
        if isinstance(reply.message, messages.Welcome):  # a recipe, as often as anyone likes to knock
            self.callers.weigh(identity.name, len(reply.payload))
        sent = frames(reply, offset=_agreed(reply, have))
        await context.write(next(sent))
        if reply.payload:
            async with self._turn():
                for chunk in sent:
                    await context.write(chunk)

    async def _refuse(self, who: str, refused: Refused, context: Any) -> None:
        self.on_refusal(who, refused)
        for frame in frames(Said(messages.Refusal(code=refused.code, text=refused.text[:2000]))):
            await context.write(frame)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for a turn to send a payload: a round begins for all devices at once, and each takes memory meanwhile.

        One that takes long does not count any more.
        """
        await self.sending.acquire()
        with contextlib.ExitStack() as counted:
            counted.callback(self.sending.release)
            slow = asyncio.get_running_loop().call_later(_PROMPT, counted.close)
            counted.callback(slow.cancel)
            yield

    async def _answer(self, identity: Identity, incoming: AsyncIterator[bytes]) -> tuple[Said, Part | None]:
        """Return what to say, and what the peer has of it already."""

        def cap(message: Message, part: Part) -> int:
            with _named(message, part):
                return self.allowed(identity, message, part)

        message, envelope, payload = await receive(incoming, identity.name, self.partials, cap, _HEADER_SECONDS)
        if isinstance(message, messages.Have):
            return Said(messages.Held(size=self.partials.size(identity.name, message.digest))), None
        if payload:
            self.revocations.check(identity)  # again, for it may have taken minutes
        heard = Heard(message, payload)
        heard.digest = envelope.payload.digest if envelope.payload is not None else ""
        with self.partials.handling(payload), _named(message, envelope.payload):
            return await self.handle(identity, heard), envelope.have


@contextlib.contextmanager
def _named(message: Message, part: Part | None) -> Iterator[None]:
    """Let a refusal say what was refused."""
    try:
        yield
    except Refused as refused:
        facts = {"kind": message.kind, "round": getattr(message, "round", None), "digest": part and part.digest}
        refused.about = {key: value for key, value in facts.items() if value is not None}
        raise


def _configured(own: Own) -> grpc.ServerCertificateConfiguration:
    pems = own.pems
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.certificate)], pems.authority)


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


def _connections(address: str) -> int:
    """Return how many connections an address may have, with as many open files as the system allows this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):  # macOS has another limit besides
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = _FILES if soft == resource.RLIM_INFINITY else min(soft, _FILES)
    left = open_files - len(os.listdir("/dev/fd")) - _RESERVE
    host = address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(OSError):
        left //= len({found[4][0] for found in socket.getaddrinfo(host, None)})  # gRPC counts for each of them
    if left < 1:
        raise BadInput(f"--listen {address}: this process may have {open_files} open files; raise it: ulimit -n 4096")
    return left
