"""Who gets in: only holders of a valid certificate of our authority, over TLS 1.2 or later, as who they are."""

from __future__ import annotations

import asyncio
import socket
import ssl
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from deploy_harness import answering, channel

from personafl.deploy import pki
from personafl.deploy.net.messages import Code, Pull, Refused, Status
from personafl.deploy.net.transport import Channel, Unreachable

ASK = Pull(returning=False)


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    pki.init(tmp_path / "pki")
    return tmp_path / "pki"


def asked(folder: Path, files: pki.Files, refusals: list[object] | None = None) -> bytes:
    """Ask a server that says who called."""

    async def once() -> bytes:
        async with answering(folder, refusals=refusals) as port, channel(port, files) as line:
            return (await line.ask(ASK, tries=1)).payload

    return asyncio.run(once())


def test_a_caller_is_who_its_certificate_says(authority: Path) -> None:
    assert asked(authority, pki.issue(authority, "device-7")) == b"device-7:"


def test_a_certificate_of_another_authority_is_refused(authority: Path, tmp_path: Path) -> None:
    pki.init(tmp_path / "other")
    theirs = pki.issue(tmp_path / "other", "device-7")
    for trusted in (theirs.authority, authority / "ca.pem"):  # it does not trust the server; it does
        with pytest.raises(Unreachable):
            asked(authority, pki.Files(theirs.certificate, theirs.key, trusted))


def test_an_expired_certificate_is_refused(authority: Path) -> None:
    with pytest.raises(Refused) as caught:  # by TLS; its holder is told why by its own side
        asked(authority, pki.issue(authority, "device-7", lifetime=timedelta(days=-1)))
    assert caught.value.code is Code.EXPIRED
    assert "device-7 ended on" in caught.value.text


def test_a_revoked_certificate_is_refused_by_name_on_a_connection_that_is_open(authority: Path) -> None:
    files = pki.issue(authority, "device-7")
    refusals: list[object] = []

    async def twice() -> None:
        async with answering(authority, refusals=refusals) as port, channel(port, files) as line:
            await line.ask(ASK, tries=1)
            pki.revoke(authority, "device-7")
            await line.ask(ASK, tries=1)

    with pytest.raises(Refused) as caught:
        asyncio.run(twice())
    assert caught.value.code is Code.REVOKED
    assert refusals == [("device-7", Code.REVOKED)]


def test_a_certificate_signed_by_ours_with_a_name_that_is_none_is_refused(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pki, "role_of", lambda name: "device")
    files = pki.issue(authority, "stranger-1")
    monkeypatch.undo()
    with pytest.raises(Refused) as caught:
        asked(authority, files)
    assert caught.value.code is Code.BAD_CERTIFICATE


def test_a_device_does_not_pass_for_a_server(authority: Path) -> None:
    """Its certificate is of the same authority, and has neither the use nor the host's name."""
    device = pki.issue(authority, "device-1")

    async def impostor() -> None:
        async with answering(authority) as port:
            pass
        pair = (device.key.read_bytes(), device.certificate.read_bytes())
        server = grpc.aio.server()
        credentials = grpc.ssl_server_credentials([pair], device.authority.read_bytes(), require_client_auth=True)
        port = server.add_secure_port("localhost:0", credentials)
        await server.start()
        try:
            async with channel(port, device) as line:
                await line.ask(ASK, tries=1)
        finally:
            await server.stop(grace=None)

    with pytest.raises(Unreachable):
        asyncio.run(impostor())


def test_a_server_under_another_host_name_is_refused(authority: Path) -> None:
    files = pki.issue(authority, "device-1")

    async def elsewhere() -> None:
        async with answering(authority) as port:
            renamed = pki.issue(authority, "server", hosts=["example.org"])
            pair = (renamed.key.read_bytes(), renamed.certificate.read_bytes())
            server = grpc.aio.server()
            other = server.add_secure_port(
                "localhost:0", grpc.ssl_server_credentials([pair], renamed.authority.read_bytes(), True)
            )
            await server.start()
            assert other != port
            try:
                async with channel(other, files) as line:
                    await line.ask(Status(), tries=1)
            finally:
                await server.stop(grace=None)

    with pytest.raises(Unreachable):
        asyncio.run(elsewhere())


def test_without_a_certificate_nobody_gets_in(authority: Path) -> None:
    async def bare() -> None:
        async with answering(authority) as port:
            credentials = grpc.ssl_channel_credentials((authority / "ca.pem").read_bytes())
            async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as line:
                call = line.stream_stream("/personafl.v1.Peer/Exchange")()
                await call.write(b"{}")
                await call.read()

    with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
        asyncio.run(bare())


def test_plaintext_is_refused(authority: Path) -> None:
    async def plain() -> None:
        async with answering(authority) as port, grpc.aio.insecure_channel(f"localhost:{port}") as line:
            call = line.stream_stream("/personafl.v1.Peer/Exchange")()
            await call.write(b"{}")
            await call.read()

    with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
        asyncio.run(plain())


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_tls_before_1_2_is_refused_and_1_2_is_not(authority: Path) -> None:
    files = pki.issue(authority, "device-1")

    def handshake(port: int, version: ssl.TLSVersion) -> str | None:
        context = ssl.create_default_context(cafile=str(files.authority))
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # what Python 3.13 asks for by itself
        context.load_cert_chain(files.certificate, files.key)
        context.set_ciphers("ALL:@SECLEVEL=0")  # or this side would be the one that refuses
        context.minimum_version = context.maximum_version = version
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("localhost", port)) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as wrapped,
        ):
            return wrapped.version()

    async def tried(version: ssl.TLSVersion) -> str | None:
        async with answering(authority) as port:
            return await asyncio.to_thread(handshake, port, version)

    assert asyncio.run(tried(ssl.TLSVersion.TLSv1_2)) == "TLSv1.2"
    for version in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            asyncio.run(tried(version))


def test_a_question_waits_for_a_server_that_is_away(authority: Path) -> None:
    """It is asked before there is a server, and answered once there is one."""
    files = pki.issue(authority, "device-1")
    told: list[str] = []

    async def patient() -> bytes:
        async with answering(authority) as port:
            pass
        line = Channel(f"localhost:{port}", files, lambda kind: 2**20, told.append)
        asking = asyncio.create_task(line.ask(ASK, b"x" * 10))
        while not told:
            await asyncio.sleep(0.01)
        async with answering(authority, port=port):
            said = await asking
            await line.close()
        return said.payload

    assert asyncio.run(patient()) == b"device-1:" + b"x" * 10
    assert "trying again" in told[0]
