"""A real SuperLink, SuperNodes and `flwr run`, as processes on loopback, with TLS; nothing is asked of anyone else.

python tests/flower/superlink.py      # seconds a round, against the built-in transport; one JSON line each
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from processes import HANGING, Cluster, free_port, recipe_of, unscaled

from personafl.deploy import pki
from personafl.deploy.device.dealing import deal
from personafl.flower.app import write_app
from personafl.recipe.recipe import Recipe

__all__ = ["Deployment", "deployment"]

BIN = Path(sys.executable).parent
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
}


@dataclass
class Deployment:
    """A folder with certificates, dealt data and an app; start and kill processes by name."""

    recipe: Recipe
    folder: Path
    port: int = field(default_factory=free_port)
    living: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pki.init(self.folder / "pki")
        self.files = pki.issue(self.folder / "pki", "server")
        self.recipe, files = deal(self.recipe, self.folder / "dealt")
        self.numbers = [int(file.stem.removeprefix("device-")) for file in files]
        write_app(self.recipe, self.folder / "app")
        home = self.folder / "homes" / "user"
        home.mkdir(parents=True)
        connection = f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{self.files.authority}"\n'
        (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{connection}')

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def start_superlink(self, *more: str) -> None:
        files = self.files
        words = ["--host", "127.0.0.1", "--port", self.port, "--ssl-ca-certfile", files.authority]
        words += ["--ssl-certfile", files.certificate, "--ssl-keyfile", files.key]
        self._start("superlink", "flower-superlink", *words, *more)
        self.until(lambda: "Uvicorn running" in self.log("superlink"))

    def start_node(self, number: int, key: str | None = None, port: int | None = None) -> None:
        """Start the node of a client; if it has a key, that is its name. `port`: if it is not the SuperLink's own."""
        state = self.folder / "nodes" / key if key else self.state(number)
        data = self.folder / "dealt" / f"device-{number}.safetensors"
        config = f'client={number} data="{data}" state="{state}"'
        words = ["--superlink", f"127.0.0.1:{port or self.port}", "--root-certificates", self.files.authority]
        words += ["--auth-supernode-private-key", self.folder / key] if key else []
        words += ["--port", free_port(), "--node-config", config]
        self._start(key or f"node-{number}", "flower-supernode", *words)

    def start_nginx(self, server: str) -> None:
        """Start nginx with a server of the documentation."""
        paths = (f"{kind}_path {self.folder / kind};" for kind in ("client_body_temp", "proxy_temp", "fastcgi_temp"))
        more = (f"{kind}_path {self.folder / kind};" for kind in ("uwsgi_temp", "scgi_temp"))
        http = f"http {{ access_log off; {' '.join([*paths, *more])} {server} }}"
        top = f"daemon off; pid {self.folder / 'nginx.pid'}; error_log stderr; events {{}}"
        (self.folder / "nginx.conf").write_text(f"{top}\n{http}\n")
        with (self.folder / "nginx.log").open("ab") as log:
            self.living["nginx"] = subprocess.Popen(
                ["nginx", "-c", str(self.folder / "nginx.conf"), "-p", str(self.folder)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def make_key(self, name: str) -> None:
        """Do what `ssh-keygen -t ecdsa -b 384` does."""
        key = ec.generate_private_key(ec.SECP384R1())
        private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        (self.folder / name).write_bytes(private)
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        (self.folder / f"{name}.pub").write_bytes(public)

    def register(self, key: str) -> None:
        """Do `flwr supernode register`."""
        self._start("user", "flwr", "supernode", "register", self.folder / f"{key}.pub")
        assert self.living.pop("user").wait() == 0, self.log("user")

    def start_app(self, config: str = "") -> None:
        """Do `flwr run`."""
        self._start(
            "user", "flwr", "run", self.folder / "app", "--run-config", f'out="{self.out}" {config}', "--stream"
        )

    def state(self, number: int) -> Path:
        return self.folder / "nodes" / str(number)

    def kill(self, name: str) -> None:
        """SIGKILL a process and all that it has started."""
        process = self.living.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def journal(self) -> list[dict[str, Any]]:
        path = self.out / "journal.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def closed(self) -> int:
        return sum(entry["event"] == "closed" for entry in self.journal())

    def until(self, holds: Callable[[], bool], seconds: float = HANGING) -> None:
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                logs = {file.name: file.read_text()[-3000:] for file in self.folder.glob("*.log")}
                raise AssertionError("\n".join(f"=== {name}\n{text}" for name, text in logs.items()))
            time.sleep(0.05)

    def _start(self, name: str, command: str, *words: object) -> None:
        home = self.folder / "homes" / name
        env = {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.living[name] = subprocess.Popen(
                [str(BIN / command), *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                cwd=self.folder,
                start_new_session=True,  # so that `kill` reaches what it starts
            )


@contextlib.contextmanager
def deployment(recipe: Recipe, folder: Path) -> Iterator[Deployment]:
    """Make one, and end all its processes with the block."""
    made = Deployment(recipe, folder)
    try:
        yield made
    finally:
        for name in list(made.living):
            made.kill(name)


def _seconds(journal: Path) -> list[float]:
    """Return how long each round was open."""
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    times = {what: [e["time"] for e in entries if e["event"] == what] for what in ("opened", "closed")}
    return [round(closed - opened, 2) for opened, closed in zip(times["opened"], times["closed"], strict=True)]


def measure() -> None:
    """Print how long rounds take: FedAlt, a small network, three nodes."""
    recipe = unscaled(recipe_of("fedalt", rounds=5))
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(recipe, Path(folder))
        for name in ("server", *cluster.devices):
            cluster.start(name)
        cluster.wait()
        print(json.dumps({"built-in": _seconds(Path(folder) / "run" / "journal.jsonl")}), flush=True)
    with tempfile.TemporaryDirectory() as folder, deployment(recipe, Path(folder)) as made:
        made.start_superlink()
        for number in made.numbers:
            made.start_node(number)
        made.start_app()
        made.until(lambda: made.closed() == recipe.rounds)
        print(json.dumps({"flower": _seconds(made.out / "journal.jsonl")}), flush=True)


if __name__ == "__main__":
    measure()
