"""The page of runs in progress, on this machine only: made anew whenever it is asked for."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from personafl.errors import BadInput
from personafl.report.about import recipes, standings
from personafl.report.load import Source, load
from personafl.report.page import page_of
from personafl.report.progress import changed_at

HOST = "127.0.0.1"  # nobody else can see it


@contextlib.contextmanager
def served(paths: Sequence[Path], port: int = 0) -> Iterator[str]:
    """Serve the page inside, and give its address; port 0 is any that is free."""
    try:
        server = _Server((HOST, port), _Handler)
    except (OSError, OverflowError) as error:
        raise BadInput(
            f"--port: {port} cannot be used on {HOST} ({error}); give another, or none for a free one"
        ) from error
    server.paths = paths
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    paths: Sequence[Path]


class _Handler(BaseHTTPRequestHandler):
    """Answers with the page, with what changes when there is more, and with the recipes that the page links to."""

    server: _Server

    def do_GET(self) -> None:
        """Answer a request."""
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):  # a foreign page in the browser
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "only for this machine")
            return
        try:
            sources = load(self.server.paths)
            self._answer(sources)
        except BadInput as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", str(error))

    def _answer(self, sources: Sequence[Source]) -> None:
        folder = sources[0].path
        pages: dict[str, tuple[str, Callable[[], str]]] = {
            "/": ("text/html", lambda: page_of(sources, folder, live=True)),
            "/version": ("text/plain", lambda: str(changed_at(sources))),
        }
        links = [link for _, link, _ in recipes(sources, folder)]
        links += [standing.link for standing in standings(sources, folder) if standing.link]
        pages |= {f"/{link}": ("text/plain", (folder / link).read_text) for link in links}
        kind, text = pages.get(self.path, ("", None))
        if text is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "not here")
        else:
            self._send(HTTPStatus.OK, kind, text())

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # its name there
        """Say nothing: the terminal shows the runs."""
