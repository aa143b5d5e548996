"""A real deployment from Python, as the commands of the same names: certificates, servers, devices.

Each of `run_server`, `run_coordinator` and `run_device` works until its part is over, as the commands do; a process of
its own for each is what they are made for.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from personafl.errors import BadInput, PersonaError, printable

if TYPE_CHECKING:
    from personafl.api.calls import RecipeLike
    from personafl.deploy.net.identity import Files

Tell = Callable[[str], None]  # what is told what happens, line by line


def make_authority(directory: str | Path, *, days: int = 3650) -> Path:
    """Make an authority, whose certificates machines trust, and return its certificate's file."""
    check_extra()
    from personafl.deploy.pki import init

    return init(Path(directory), days)


def issue_certificates(
    directory: str | Path, names: Sequence[str], *, hosts: Sequence[str] | None = None, days: int = 90
) -> dict[str, Files]:
    """Issue certificates, or renew them, for names such as "server" and "device-1"; return the files of each.

    `hosts` are the names and addresses under which a server is reached; None: this machine's.
    """
    check_extra()
    from personafl.deploy.pki import LOCAL_HOSTS, issue_all

    if isinstance(names, str):
        raise BadInput(f"names = {names!r}: give a list of them, as in ['server', 'device-1']")
    return issue_all(Path(directory), names, hosts or LOCAL_HOSTS, timedelta(days=days))


def revoke_certificates(directory: str | Path, name: str) -> int:
    """Revoke all certificates of a name, and return how many; servers that read this directory refuse it then."""
    check_extra()
    from personafl.deploy.pki import revoke

    return revoke(Path(directory), name)


def run_server(
    recipe: RecipeLike,
    *,
    identity: str | Path,
    listen: str = "localhost:8443",
    out: str | Path | None = None,
    revoked: str | Path | None = None,
    coordinator: str | None = None,
    stay: bool = False,
    roll_back: int | None = None,
    metrics: str | None = None,
    log_format: str = "text",
    tell: Tell | None = None,
) -> Path:
    """Serve a recipe to devices until its last round, and return the run directory; one that exists is continued.

    `identity` is this machine's certificate, NAME.pem; NAME.key and ca.pem lie beside it. With a `coordinator`,
    HOST:PORT, this is one of the servers of a recipe with a cloud. With `stay` it serves newcomers at the end. With
    `roll_back` nothing is served: the run goes back to the end of that round, and is continued by the next call.
    At `metrics`, HOST:PORT or a port of this machine, are /metrics for Prometheus, /healthz and /readyz. What `tell`
    is told is a line of words, or with `log_format` "json" a line of JSON.
    """
    check_extra()
    from personafl.deploy.server import cloudserver, going_back, server, summingserver

    given = _listening(recipe, identity, listen, out, revoked, metrics)
    heard = _heard(tell, log_format)
    if roll_back is not None:
        if coordinator is not None:
            raise BadInput("--roll-back: servers of a cloud go on together, and none goes back alone; begin a new run")
        going_back.roll_back(given["recipe"], given["out"], roll_back)
        return Path(given["out"])
    with _failing(heard):
        if coordinator is None:
            seen = given["recipe"].secure is None
            serve = server.run_server if seen else summingserver.run_summing_server
            asyncio.run(serve(server.ServerConfig(**given, stay=stay), heard))
        else:
            config = cloudserver.CloudServerConfig(**given, stay=stay, coordinator=coordinator)
            asyncio.run(cloudserver.run_cloud_server(config, heard))
    path: Path = given["out"]
    return path


def run_coordinator(
    recipe: RecipeLike,
    *,
    identity: str | Path,
    listen: str = "localhost:8442",
    out: str | Path | None = None,
    revoked: str | Path | None = None,
    metrics: str | None = None,
    log_format: str = "text",
    tell: Tell | None = None,
) -> Path:
    """Coordinate the servers of a recipe with a cloud, and return the run directory; one that exists is continued.

    `metrics` and `log_format` are those of `run_server`.
    """
    check_extra()
    from personafl.deploy.server import coordinator
    from personafl.deploy.server.service import ServiceConfig

    given = _listening(recipe, identity, listen, out, revoked, metrics)
    heard = _heard(tell, log_format)
    with _failing(heard):
        asyncio.run(coordinator.run_coordinator(ServiceConfig(**given), heard))
    path: Path = given["out"]
    return path


def run_device(
    server: str,
    *,
    data: str | Path,
    identity: str | Path,
    state: str | Path,
    profile: str | None = None,
    policy: str | Path | None = None,
    metrics: str | None = None,
    log_format: str = "text",
    tell: Tell | None = None,
) -> None:
    """Take part as a device: train on one's own data, send what the method declares, keep the rest in `state`.

    `server` is HOST:PORT; of a cloud several, with commas between them: the device finds the one that has it.
    `data` is a file that `deal` wrote, or a data set of the device's own; `predict(state, …)` then uses its model.
    `policy` is a file that says what the device agrees to; a recipe that asks for more is refused.
    `metrics` and `log_format` are those of `run_server`.
    """
    check_extra()
    from personafl.deploy.device import device
    from personafl.deploy.device.policy import Policy
    from personafl.deploy.net.identity import Files

    files = Files.beside(Path(identity))
    agreed = Policy() if policy is None else Policy.read(Path(policy))
    config = device.DeviceConfig(
        server=server, data=str(data), state=Path(state), files=files, profile=profile, policy=agreed, metrics=metrics
    )
    heard = _heard(tell, log_format)
    with _failing(heard, files.certificate.stem):
        asyncio.run(device.run_device(config, heard))


def ask_status(server: str, *, identity: str | Path) -> dict[str, Any]:
    """Return how far a server is, and which devices are with it; or a coordinator, and its servers."""
    check_extra()
    from personafl.deploy.net import transport
    from personafl.deploy.net.identity import Files

    return asyncio.run(transport.ask_status(server, Files.beside(Path(identity))))


def drop_device(server: str, name: str, *, identity: str | Path, undo: bool = False, to: str | None = None) -> bool:
    """Have a server leave a device out from now on, or with `undo` let it in again; return whether it was so before.

    Or have a coordinator go on without a server, "cloud-2", for good: `to` is the one that has its devices then; None:
    all that are left, in turn. `identity` is a coordinator's certificate.
    """
    check_extra()
    from personafl.deploy.net.identity import Files, role_of
    from personafl.deploy.net.operating import ask_drop

    role = role_of(name)
    if role not in ("device", "cloud"):
        raise BadInput(f"name {name!r}: is no device's; give one that personafl status lists, such as device-7")
    if role == "device" and to is not None:
        raise BadInput(f"--to {to}: is for a server that is dropped, as cloud-2, whose devices go there")
    return asyncio.run(ask_drop(server, Files.beside(Path(identity)), name, undo=undo, to=to))


def check_extra(*packages: tuple[str, str, str]) -> None:
    """Fail if packages (module, name, extra) are not installed; those of a deployment, if none is named."""
    for package, name, extra in packages or (("grpc", "grpcio", "deploy"), ("cryptography", "cryptography", "deploy")):
        if importlib.util.find_spec(package) is None:
            raise BadInput(f"{name} is not installed; install the extra: pip install 'personafl[{extra}]'")


def _listening(
    recipe: RecipeLike,
    identity: str | Path,
    listen: str,
    out: str | Path | None,
    revoked: str | Path | None,
    metrics: str | None,
) -> dict[str, Any]:
    """Return what every process that listens is started with."""
    from personafl.api.calls import as_recipe
    from personafl.deploy.net.identity import Files
    from personafl.runs.start import settled

    whole, certificate = settled(as_recipe(recipe)), Path(identity)
    return {
        "recipe": whole,
        "out": Path("runs") / f"{whole.name}-{certificate.stem}" if out is None else Path(out),
        "files": Files.beside(certificate),
        "revocations": certificate.with_name("revoked.pem") if revoked is None else Path(revoked),
        "listen": listen,
        "metrics": metrics,
    }


def _heard(tell: Tell | None, log_format: str) -> Callable[[Any], None]:
    if log_format not in ("text", "json"):
        raise BadInput(f"--log-format {log_format}: text or json")
    if tell is None:
        return _unheard
    if log_format == "json":
        return lambda told: tell(told.as_json())
    return lambda told: None if told.what == "failed" else tell(printable(str(told)))


@contextlib.contextmanager
def _failing(heard: Callable[[Any], None], who: str | None = None) -> Iterator[None]:
    """Let a log that programs read have the error that ends a process, too."""
    from personafl.deploy.net.telling import Told

    try:
        yield
    except PersonaError as error:
        heard(Told("failed", str(error), who))
        raise


def _unheard(said: Any) -> None:
    """Nobody listens."""
