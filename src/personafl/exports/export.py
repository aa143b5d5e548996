"""The models of a finished run as files for devices: see `modelfile` for what is in them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from personafl.core.algorithm import Algorithm
from personafl.core.net import Net
from personafl.data.federated import FederatedData
from personafl.data.sources import Dataset
from personafl.errors import BadInput
from personafl.exports.card import facts_of, model_card
from personafl.exports.finished import Finished
from personafl.exports.onnxfile import check_installed, onnx_file
from personafl.models.cost import latency, multiply_adds
from personafl.models.modelfile import Card, Part, card_of, compacted, described, low_rank, pack, summed
from personafl.models.peftfolder import files_of
from personafl.runs.given import Given
from personafl.storage.files import atomic_write, storage

Listener = Callable[[int, int], None]  # models written, of how many
_SAMPLES = 64  # that an ONNX file is checked on


@dataclass(frozen=True)
class Latency:
    """Median milliseconds for a batch on this machine's CPU, with dense weights and as exported."""

    dense_ms: float
    exported_ms: float
    batch: int
    threads: int


@dataclass(frozen=True)
class ExportedModel:
    """A model that was written: numbers stored, bytes of the file, and multiply-adds for a sample.

    The dense ones are those of the same model with dense weights: its file, with the same description, and its network;
    `bytes_fp32` is that file in single precision. `accuracies` are on the same test data: of this model, and of
    whatever else there is for the client (global, personal, tuned; local, if it was run in the same comparison).
    """

    model: Literal["global", "personal", "tuned"]
    client: str | None
    file: Path
    card: Path  # the same in words
    onnx: Path | None
    parameters: int
    parameters_dense: int
    bits: int | None  # of a weight in the layers that are quantized; None: none is
    bytes: int
    bytes_dense: int
    bytes_fp32: int
    bytes_onnx: int | None
    multiply_adds: int
    multiply_adds_dense: int
    test_accuracy: float | None
    accuracies: dict[str, float]
    latency: Latency | None = None  # of the global model, and of the first client's


@dataclass(frozen=True)
class Exported:
    """What an export wrote, and where."""

    run: Path
    path: Path
    method: str
    models: tuple[ExportedModel, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as `personafl export --json` prints it."""
        models = [
            {key: str(value) if isinstance(value, Path) else value for key, value in dataclasses.asdict(model).items()}
            for model in self.models
        ]
        return {"run": str(self.run), "out": str(self.path), "method": self.method, "models": models}


def export(
    run: str | Path,
    out: str | Path | None = None,
    clients: Sequence[str] | Literal["all"] | None = None,
    *,
    data: FederatedData | Dataset | None = None,
    model: nn.Module | None = None,
    algorithm: Algorithm | None = None,
    onnx: bool = False,
    peft: bool = False,
    batch: int | None = None,
    listener: Listener | None = None,
) -> Exported:
    """Write the global model of a finished run, and the last personal model of some or "all" clients, as files.

    They are `global.safetensors` and `client-NAME.safetensors` in `out`, or in the run's directory under export/;
    `personafl.load_model` makes networks of them. Beside each is a model card, .md, and with onnx=True the same model
    for onnxruntime, .onnx; with peft=True, if it is LoRA adapters, a folder of the same name that `peft` loads. A run
    that was begun with objects needs the same ones again. With a `batch`, the time that the networks take for so many
    samples is measured too.
    """
    return write_models(
        run, out, clients, Given(data, model, algorithm), onnx=onnx, peft=peft, batch=batch, listener=listener
    )


def write_models(
    run: str | Path,
    out: str | Path | None,
    clients: Sequence[str] | Literal["all"] | None,
    given: Given,
    *,
    onnx: bool = False,
    peft: bool = False,
    batch: int | None = None,
    listener: Listener | None = None,
) -> Exported:
    """Write models as `export` does, with the objects that the run was begun with."""
    if onnx:
        check_installed()
    run = Path(run)
    out = run / "export" if out is None else Path(out)
    finished = Finished(run, given)
    members = finished.members(clients)
    shared = [None] if finished.has(None, "global") else []
    if members and not finished.has(members[0], "personal", "tuned"):
        raise BadInput(
            f"{run}: {finished.origin.method} makes no personal models, all clients use the global one; "
            "export that one alone"
        )
    if not members and not shared:
        raise BadInput(f"{run}: {finished.origin.method} has no global model; export those of clients: --all-clients")
    _refuse_others(out, finished.digest)
    with storage(out):
        out.mkdir(parents=True, exist_ok=True)
    files = _file_names(finished.names)
    written: list[ExportedModel] = []
    for client in [*shared, *members]:
        timed = batch if client is None or client == members[0] else None
        file = out / ("global.safetensors" if client is None else files[client])
        written.append(_write(finished, client, file, timed, onnx=onnx, peft=peft))
        if listener is not None:
            listener(len(written), len(shared) + len(members))
    return Exported(run, out, finished.origin.method, tuple(written))


def _write(
    finished: Finished, client: int | None, file: Path, batch: int | None, *, onnx: bool, peft: bool
) -> ExportedModel:
    """Write the model of all, or the last one of a client, and return what it is."""
    models = finished.models(client)
    name: Any = "global" if client is None else "tuned" if "tuned" in models else "personal"
    parts, net = compacted(models[name]), finished.origin.net(client)
    whose = None if client is None else finished.names[client]
    accuracies = finished.accuracies(client)
    text = facts_of(finished.origin, client, parts, run=finished.digest, model=name, whose=whose, accuracies=accuracies)
    text |= finished.privacy(client)
    content, card = pack(parts, text), Card.model_validate(text)
    graph = _graph(finished, file, net, parts, text) if onnx else None
    adapters = files_of(net.module(), summed(models[name])) if peft else {}
    atomic_write(file, content)
    if graph is not None:
        atomic_write(file.with_suffix(".onnx"), graph)
    _write_folder(file.with_suffix(""), adapters)
    work, dense_work, spent = _costs(finished, net, parts, batch)
    exported = ExportedModel(
        model=name,
        client=whose,
        file=file,
        card=file.with_suffix(".md"),
        onnx=None if graph is None else file.with_suffix(".onnx"),
        parameters=card.parameters,
        parameters_dense=card.parameters_dense,
        bits=card.bits,
        bytes=len(content),
        bytes_dense=len(content) - card.bytes_packed + card.bytes_dense,
        bytes_fp32=len(content) - card.bytes_packed + (card.bytes_fp32 or 0),
        bytes_onnx=None if graph is None else len(graph),
        multiply_adds=work,
        multiply_adds_dense=dense_work,
        test_accuracy=accuracies.get(name),
        accuracies=accuracies,
        latency=spent,
    )
    atomic_write(exported.card, model_card(card, exported.file).encode())
    return exported


def _write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files, given by name, into a folder; none makes no folder."""
    with storage(folder):
        if files:
            folder.mkdir(exist_ok=True)
    for name, content in files.items():
        atomic_write(folder / name, content)


def _graph(finished: Finished, file: Path, net: Net, parts: tuple[Part, ...], facts: dict[str, str]) -> bytes:
    """Return the ONNX file of a model."""
    try:
        return onnx_file(finished.network(net, parts), finished.inputs(_SAMPLES), described(facts))
    except BadInput as error:
        name = json.loads(facts["network"])["name"] or "the model that was given"
        raise BadInput(f"{file.with_suffix('.onnx')}: not written, {name}: {error}; export without --onnx") from error


def _costs(finished: Finished, net: Net, parts: tuple[Part, ...], batch: int | None) -> tuple[int, int, Latency | None]:
    """Return multiply-adds as exported and dense; with a batch, the time they take."""
    x = finished.inputs(batch or 1)
    if net not in finished.dense_work:
        finished.dense_work[net] = multiply_adds(finished.network(net, parts, dense=True), x[:1])
    work = dense_work = finished.dense_work[net]
    networks: dict[str, nn.Module] = {}
    if low_rank(parts):
        networks["exported"] = finished.network(net, parts)
        work = multiply_adds(networks["exported"], x[:1])
    if batch is None:
        return work, dense_work, None
    networks["dense"] = finished.network(net, parts, dense=True)
    spent = latency(networks, x)
    exported = spent.get("exported", spent["dense"])  # else it is the same network
    return work, dense_work, Latency(spent["dense"], exported, batch, torch.get_num_threads())


def _refuse_others(out: Path, digest: str) -> None:
    """Fail if a directory has models that are not of this run: they would be taken for its own, or overwritten."""
    with storage(out):
        found = [path for name in ("global.*", "client-*.*", "*.safetensors") for path in out.glob(name)]
    for path in sorted(set(found)):
        if path.suffix not in (".safetensors", ".onnx", ".md"):
            continue
        try:  # the other files of a model are written after its own
            same = card_of(path.with_suffix(".safetensors")).run == digest
        except BadInput:
            same = False
        if not same:
            raise BadInput(f"{path}: is there already and not from this run; choose another --out, or remove it")


def _file_names(names: Sequence[str]) -> list[str]:
    """Return a file name per client that any file system takes; where names had to change or look alike, a digest."""
    plain = [re.sub(r"[^A-Za-z0-9._-]", "_", name)[:80] for name in names]
    alike = Counter(text.lower() for text in plain)
    return [
        f"client-{text}.safetensors"
        if text == name and alike[text.lower()] == 1
        else f"client-{text}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.safetensors"
        for text, name in zip(plain, names, strict=True)
    ]
