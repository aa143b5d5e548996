"""The commands for devices and servers as processes of their own: pki, server, coordinator, device, …"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from personafl.cli.console import err, out, say
from personafl.cli.options import Json, parsed
from personafl.errors import BadInput, printable

if TYPE_CHECKING:
    pass


Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the authority.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="server, coordinator, cloud-NAME or device-NAME.")]
Identity = Annotated[
    Path, typer.Option(metavar="NAME.pem", help="This machine's certificate; NAME.key and ca.pem lie beside it.")
]
Server = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the server is.")]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="RECIPE.toml [KEY.SUB=VALUE]...", help="With a deploy section; see data deal."),
]
Listen = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Run directory; one that exists is continued.")]
Metrics = Annotated[
    str | None, typer.Option(metavar="[HOST:]PORT", help="Where /metrics, /healthz and /readyz are; plain HTTP.")
]
LogFormat = Annotated[str, typer.Option(metavar="text|json", help="What is printed: words, or a line of JSON each.")]
Revoked = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Revocations; if not given, revoked.pem beside NAME.pem.")
]


def pki_init(
    directory: Directory,
    days: Annotated[int, typer.Option(min=1, metavar="N", help="How long the authority is valid.")] = 3650,
) -> None:
    """Make an authority, whose certificates machines trust."""
    from personafl.api.deployment import make_authority

    say(f"authority: {make_authority(directory, days=days)}; keep {directory / 'ca.key'} to yourself")


def pki_issue(
    directory: Directory,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="server, coordinator, cloud-X, device-X.")],
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME|ADDRESS", help="Under which a server is reached; if not given, this one."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, metavar="N", help="How long they are valid.")] = 90,
) -> None:
    """Issue certificates, or renew them."""
    from personafl.api.deployment import issue_certificates

    for name, files in issue_certificates(directory, names, hosts=hosts, days=days).items():
        say(f"{name}: carry {files.certificate}, {files.key} and {files.authority} to its machine")


def pki_revoke(directory: Directory, name: Name) -> None:
    """Revoke all certificates of a name; servers that read this directory refuse it from the next call on."""
    from personafl.api.deployment import revoke_certificates

    say(f"{name}: {revoke_certificates(directory, name)} certificates revoked; list: {directory / 'revoked.pem'}")


def server(
    identity: Identity,
    words: Words = None,
    listen: Listen = "localhost:8443",
    out_path: Out = None,
    revoked: Revoked = None,
    coordinator: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Of a recipe with several servers; this one is cloud-N.")
    ] = None,
    stay: Annotated[bool, typer.Option("--stay", metavar="", help="Serve newcomers after the last round.")] = False,
    roll_back: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Go back to the end of round N, and stop; start it again without this."),
    ] = None,
    metrics: Metrics = None,
    log_format: LogFormat = "text",
) -> None:
    """Serve a recipe to devices; the same command continues it after a crash."""
    from personafl.api.deployment import run_server

    path = run_server(
        parsed(words),
        identity=identity,
        listen=listen,
        out=out_path,
        revoked=revoked,
        coordinator=coordinator,
        stay=stay,
        roll_back=roll_back,
        metrics=metrics,
        log_format=log_format,
        tell=say,
    )
    if roll_back is None:
        _say_directory(path, log_format)
    else:
        say(f"{path}: is at the end of round {roll_back}; start the server again without --roll-back")


def coordinator(
    identity: Identity,
    words: Words = None,
    listen: Listen = "localhost:8442",
    out_path: Out = None,
    revoked: Revoked = None,
    metrics: Metrics = None,
    log_format: LogFormat = "text",
) -> None:
    """Coordinate the servers of a recipe with a cloud; the same command continues it after a crash."""
    from personafl.api.deployment import run_coordinator

    path = run_coordinator(
        parsed(words),
        identity=identity,
        listen=listen,
        out=out_path,
        revoked=revoked,
        metrics=metrics,
        log_format=log_format,
        tell=say,
    )
    _say_directory(path, log_format)


def _say_directory(path: Path, log_format: str) -> None:
    from personafl.deploy.net.telling import Told

    told = Told("directory", f"run directory: {path}")
    say(told.as_json() if log_format == "json" else str(told))


def device(
    server: Annotated[
        str, typer.Option(metavar="HOST:PORT[,…]", help="Where the server is; several of a cloud: one has this device.")
    ],
    data: Annotated[str, typer.Option(metavar="FILE", help="From personafl data deal, or a data set of its own.")],
    identity: Identity,
    state: Annotated[Path, typer.Option(metavar="DIR", help="What the device keeps: state and model.")],
    profile: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which of the recipe's devices this is, if it has any.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="What this device agrees to; all else is refused.")
    ] = None,
    metrics: Metrics = None,
    log_format: LogFormat = "text",
) -> None:
    """Take part as a device: train on one's own data, send what the method declares, keep the rest."""
    from personafl.api.deployment import run_device

    def tell(text: str) -> None:
        say(text if log_format == "json" else f"{identity.stem}: {text}")

    run_device(
        server,
        data=data,
        identity=identity,
        state=state,
        profile=profile,
        policy=policy,
        metrics=metrics,
        log_format=log_format,
        tell=tell,
    )


def drop(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Of the device, as in its certificate: device-7; or of a cloud-2.")
    ],
    server: Server,
    identity: Identity,
    undo: Annotated[bool, typer.Option("--undo", metavar="", help="Let it in again.")] = False,
    to: Annotated[
        str | None, typer.Option(metavar="cloud-N", help="Who has the devices of a dropped server; else all others.")
    ] = None,
) -> None:
    """Leave a device out of a run from now on: it is not selected, not waited for, and what it sends is refused.

    Or a server of a cloud, for good: ask its coordinator. Its devices go on at other servers.
    """
    from personafl.api.deployment import drop_device

    before = drop_device(server, name, identity=identity, undo=undo, to=to)
    say(f"{name}: {'was ' if before else ''}{'let in again' if undo else 'dropped'}{' before' if before else ''}")


def status(server: Server, identity: Identity, as_json: Json = False) -> None:
    """Print how far a server is, and which devices are with it; or a coordinator, and its servers."""
    from personafl.api.deployment import ask_status

    report = ask_status(server, identity=identity)
    if as_json:
        print(json.dumps(report))
        return
    if "servers" in report:
        _say_servers(report)
    else:
        _say_devices(report)
    for code, count in report["refused"].items():
        say(printable(f"refused {code}: {count}"))


def _say_servers(report: dict[str, Any]) -> None:
    state = "finished" if report["finished"] else f"waits for {report['first']} of {len(report['servers'])} servers"
    what = printable(f"{report['name']} ({report['method']}, {report['protocol']})")
    say(f"{what}: {state}, {report['done']} of {report['rounds']} rounds done")
    table = Table("server", "version", "mixes", "staleness", "alone", "", box=None, header_style="bold")
    for row in report["servers"]:
        now = next((state for state in ("dropped", "gone", "ready") if row.get(state)), "training")
        now = now if row["joined"] else "not joined"
        stale = "" if row["staleness"] is None else str(row["staleness"])
        table.add_row(
            Text(printable(row["name"])), str(row["version"]), str(row["mixes"]), stale, str(row["alone"]), now
        )
    out.print(table)


def _say_devices(report: dict[str, Any]) -> None:
    state = "finished" if report["finished"] else "training" if report["open"] else "waiting for devices"
    what = printable(f"{report['name']} ({report['method']})")
    say(f"{what}: {state}, {report['done']} of {report['rounds']} rounds done")
    if spent := report.get("privacy"):
        of = "" if spent["budget"] is None else f" of {spent['budget']:g}"
        say(f"privacy: epsilon {spent['epsilon']:.4g}{of} spent, with delta {spent['delta']:g}; {spent['assumption']}")
    if going := report["open"]:
        say(f"round {going['round'] + 1}: {len(going['taken'])} of {len(going['selected'])} updates")
    table = Table("device", "number", "samples", "", box=None, header_style="bold")
    for row in report["devices"]:
        now = next((state for state in ("dropped", "revoked", "left", "alive") if row[state]), "silent")
        met = {"clipped": row.get("clipped"), "left out": row.get("left_out")}
        now = ", ".join([now, *(f"{what} in {count} rounds" for what, count in met.items() if count)])
        table.add_row(Text(printable(row["name"])), str(row["number"]), str(row["samples"]), now)
    out.print(table)


def flower(
    words: Words = None,
    out_path: Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder of the app.")] = Path("app"),
) -> None:
    """Write a recipe as a Flower app, for those who run a SuperLink: then flwr run DIR."""
    from personafl.flower.app import write_flower_app

    write_flower_app(parsed(words), out_path)
    say(f"app: {out_path}; start it with flwr run {out_path}")


def predict(
    model: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="A device's --state, or its model.safetensors.")],
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="A dealt file (its test samples), or a data set.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Of a language model: print how it goes on.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=10**6, metavar="N", help="With --prompt: at most so many.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0.0, metavar="T", help="With --prompt: 0 is the most probable token; above, drawn.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="With --temperature: of what is drawn.")] = 0,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Also say how probable each class or label is.")
    ] = False,
    out_path: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.csv", help="Write a line per sample there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict with the model that a device keeps; needs no server, and no labels."""
    if (data is None) == (prompt is None):
        raise BadInput("--data and --prompt: give one of them")
    if prompt is not None:
        if probabilities or out_path is not None:
            raise BadInput("--prompt: prints text; leave out --probabilities and --out")
        from personafl.deploy.device.serving import generate

        found = generate(model, prompt, tokens, temperature, seed)
        print(
            json.dumps({"prompt": prompt, "continuation": found})
            if as_json
            else "\n".join(map(printable, found.split("\n")))
        )
    else:
        _predict(model, data or "", probabilities, out_path, as_json)


def _predict(model: Path, data: str, probabilities: bool, out_path: Path | None, as_json: bool) -> None:
    from personafl.core.tasks import task_named
    from personafl.deploy.device.serving import predict as apply
    from personafl.storage.files import storage

    found = apply(model, data)
    score, value = task_named(found.task).score, found.score
    if as_json:
        extra = {"probabilities": found.probabilities.tolist()} if probabilities else {}
        print(json.dumps({"labels": found.values.tolist(), "classes": found.named, score: value, **extra}))
    elif out_path is not None:
        with storage(out_path):
            out_path.write_text(found.to_csv(probabilities))
        say(f"predictions: {out_path}")
    else:
        lines = found.to_csv(probabilities).rstrip().split("\n") if probabilities else found.named
        print("\n".join(map(printable, lines)))
    if value is not None and not as_json:
        err.print(f"{score}: {value:.4f} on {len(found.outputs)} samples")
