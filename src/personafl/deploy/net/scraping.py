"""The pages that those who operate a process look at: /metrics, /healthz and /readyz, by plain HTTP.

Whoever asks must not keep the process from its work: connections are taken one by one with a pause in between, few at a
time, each with seconds for one short question; when there are too many, the oldest gives way. What fails here ends
nothing else. Pages have a thread of their own, and must bear being asked for while anything changes. It has no
certificates, so it is for this machine alone unless told otherwise.
"""

import asyncio
import contextlib
import functools
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from http import HTTPStatus

from personafl.deploy.net.exposition import CONTENT_TYPE
from personafl.errors import BadInput

Page = Callable[[], tuple[int, str]]  # returns a status of HTTP and a text
MOST = 16  # connections at a time
_BYTES = 8 * 2**10  # of a question
_SECONDS = 5.0  # of a connection
_PAUSE = 0.01  # seconds between two connections: a flood of them costs this process little
_TURN = 5e-4  # seconds that another thread may keep this one waiting, each time: a tenth of what Python has


@contextlib.asynccontextmanager
async def scraped(address: str | None, pages: Mapping[str, Page]) -> AsyncIterator[int | None]:
    """Show pages at an address meanwhile; the port is given. None: nowhere."""
    if address is None:
        yield None
        return
    with _listening(address) as listener:
        showing = _Showing(listener, pages)
        showing.start()
        before = sys.getswitchinterval()
        sys.setswitchinterval(_TURN)
        try:
            yield int(listener.getsockname()[1])
        finally:
            sys.setswitchinterval(before)
            await asyncio.to_thread(showing.stop)


class _Showing(threading.Thread):
    """A thread with a loop of its own: that of the process may have hundreds of devices to answer first."""

    def __init__(self, listener: socket.socket, pages: Mapping[str, Page]) -> None:
        super().__init__(name="pages", daemon=True)
        self._listener, self._pages = listener, pages
        self._begun = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._taking: asyncio.Task[None] | None = None

    def run(self) -> None:
        """Show the pages until stopped."""
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._show())

    async def _show(self) -> None:
        self._loop, self._taking = asyncio.get_running_loop(), asyncio.current_task()
        self._begun.set()
        await _take(self._listener, self._pages)

    def stop(self) -> None:
        """Show nothing any more, and wait until that is so."""
        self._begun.wait()
        assert self._taking is not None
        self._loop.call_soon_threadsafe(self._taking.cancel)
        self.join()


def _listening(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal() or int(port) >= 2**16:
        raise BadInput(f"--metrics {address}: give HOST:PORT, or a port of this machine, as in --metrics 9464")
    try:
        listener = socket.create_server(
            (host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=MOST
        )
    except OSError as error:
        raise BadInput(f"--metrics {address}: cannot be listened at ({error.strerror}); choose another port") from error
    listener.setblocking(False)
    return listener


async def _take(listener: socket.socket, pages: Mapping[str, Page]) -> None:
    """Take connections, and answer each in a task of its own."""
    loop, tasks = asyncio.get_running_loop(), list[asyncio.Task[None]]()
    try:
        while True:
            with contextlib.suppress(OSError):  # it was reset at once, or there are too many open files
                connection = await _next(loop, listener)
                tasks = [task for task in tasks if not task.done()]
                if len(tasks) >= MOST:
                    tasks.pop(0).cancel()
                tasks.append(asyncio.create_task(_answer(connection, pages)))
                tasks[-1].add_done_callback(functools.partial(_hang_up, connection))  # also if it never began
            await asyncio.sleep(_PAUSE)
    finally:
        for task in tasks:
            task.cancel()


async def _next(loop: asyncio.AbstractEventLoop, listener: socket.socket) -> socket.socket:
    """Take a connection, with no turn of the loop between taking and returning it, in which an end could lose it."""
    while True:
        with contextlib.suppress(BlockingIOError):
            return listener.accept()[0]
        waiting = asyncio.Event()
        loop.add_reader(listener, waiting.set)
        try:
            await waiting.wait()
        finally:
            loop.remove_reader(listener)


async def _answer(connection: socket.socket, pages: Mapping[str, Page]) -> None:
    """Answer the one question of a connection; with few calls, for each may have to wait for the process's threads."""
    loop, head = asyncio.get_running_loop(), b""
    connection.setblocking(False)
    with contextlib.suppress(OSError, TimeoutError, ValueError):
        async with asyncio.timeout(_SECONDS):
            while b"\r\n\r\n" not in head:
                part = await loop.sock_recv(connection, _BYTES - len(head))  # nothing where it was too long
                if not part:
                    return
                head += part
            await loop.sock_sendall(connection, _answered(head, pages))


def _hang_up(connection: socket.socket, _: asyncio.Task[None]) -> None:
    connection.close()


def _answered(head: bytes, pages: Mapping[str, Page]) -> bytes:
    words = head.partition(b"\r\n")[0].decode("ascii").split()
    if len(words) != 3 or words[0] not in ("GET", "HEAD"):
        status, text = 405, "only GET\n"
    elif (page := pages.get(words[1].partition("?")[0])) is None:
        status, text = 404, f"there are {' '.join(pages)}\n"
    else:
        try:
            status, text = page()
        except Exception as error:  # whatever is wrong with a page is no reason to end
            status, text = 500, f"{type(error).__name__}\n"
    body = text.encode()
    about = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {CONTENT_TYPE}\r\n"
    about += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return about.encode() + (b"" if words[:1] == ["HEAD"] else body)
