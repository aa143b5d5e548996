"""The models of a finished run as files for devices: see `modelfile` for what is in them."""

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import personafl.data.build as data_build
from personafl.core.algorithm import Algorithm
from personafl.core.net import Net
from personafl.core.split import listed
from personafl.data.federated import FederatedData
from personafl.errors import BadInput
from personafl.exports.card import model_card
from personafl.exports.facts import Origin, facts_of, sizes_of
from personafl.exports.onnxfile import check_installed, onnx_file
from personafl.models.cost import latency, multiply_adds
from personafl.models.modelfile import Card, Part, assembled, card_of, compacted, described, low_rank, pack
from personafl.models.network import SharedNetwork
from personafl.recipe.recipe import Recipe
from personafl.recipe.values import read_toml
from personafl.runs.build import prepare
from personafl.runs.checkpoints import opened
from personafl.runs.job import Job
from personafl.runs.problems import shared_network
from personafl.runs.result import Result
from personafl.runs.sizes import packed_models
from personafl.storage.files import atomic_write, read_json, storage
from personafl.storage.rundir import COMPARISON_FILE, RunDirectory, resume_command

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
    data: FederatedData | None = None,
    model: nn.Module | None = None,
    algorithm: Algorithm | None = None,
    onnx: bool = False,
    batch: int | None = None,
    listener: Listener | None = None,
) -> Exported:
    """Write the global model of a finished run, and the last personal model of some or "all" clients, as files.

    They are `global.safetensors` and `client-NAME.safetensors` in `out`, or in the run's directory under export/;
    `personafl.load_model` makes networks of them. Beside each is a model card, .md, and with onnx=True the same model
    for onnxruntime, .onnx. A run that was begun with objects needs the same ones again. With a `batch`, the time that
    the networks take for so many samples is measured too.
    """
    if onnx:
        check_installed()
    run = Path(run)
    out = run / "export" if out is None else Path(out)
    finished = _Finished(run, data, model, algorithm)
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
    written: list[ExportedModel] = []
    for client in [*shared, *members]:
        timed = batch if client is None or client == members[0] else None
        written.append(finished.write(client, out, onnx, timed))
        if listener is not None:
            listener(len(written), len(shared) + len(members))
    return Exported(run, out, finished.origin.method, tuple(written))


class _Finished:
    """A finished run and the models in it; client None stands for what all share."""

    def __init__(
        self, run: Path, data: FederatedData | None, model: nn.Module | None, algorithm: Algorithm | None
    ) -> None:
        recipe = _recipe(run)
        _check_objects(run, [name for name, given in (("model", model), ("algorithm", algorithm)) if given is not None])
        data = data or data_build.load(recipe.data, recipe.seed)
        _check_data(run, data)
        self._plain = data  # as it is given to exported models
        self._job = prepare(recipe, data, model, algorithm)
        self._federation, self._run = self._job.federation, run
        directory = RunDirectory(run)
        self._simulation, self._tuned = opened(self._job, directory, directory.checkpoint())
        self._result = Result.load(run)
        self._alone = _alone(run, recipe)
        self._files = _file_names(self._federation.data.client_names)
        self._dense_work: dict[Net, int] = {}
        self.origin = _origin(self._job)
        content = (run / "recipe.toml").read_bytes() + (run / "result.json").read_bytes()
        self.digest = hashlib.sha256(content).hexdigest()

    def members(self, clients: Sequence[str] | None) -> list[int]:
        """Return the numbers of clients given by name."""
        if clients is None or clients == "all":
            return [] if clients is None else list(self._result.columns["client"])
        asked = [clients] if isinstance(clients, str) else clients
        data = self._federation.data
        return [data.client_number(name, f"{self._run}: has") for name in dict.fromkeys(asked)]

    def has(self, client: int | None, *models: str) -> bool:
        """Say whether a client has one of the models."""
        return not self._models(client).keys().isdisjoint(models)

    def write(self, client: int | None, out: Path, onnx: bool, batch: int | None) -> ExportedModel:
        """Write the model of all, or the last one of a client, and return what it is."""
        models = self._models(client)
        name: Any = "global" if client is None else "tuned" if "tuned" in models else "personal"
        parts, net = compacted(models[name]), self.origin.net(client)
        sizes = sizes_of(self._federation.dtype, net, parts)
        accuracies = self._accuracies(client)
        whose = None if client is None else self._federation.data.client_names[client]
        facts = {"run": self.digest, **facts_of(self.origin, client), "model": name, "client": whose, **sizes}
        facts |= {"test_accuracy": accuracies.get(name), "accuracies": json.dumps(accuracies)}
        text = {key: str(value) for key, value in facts.items() if value is not None}
        content = pack(parts, text)
        file = out / ("global.safetensors" if client is None else self._files[client])
        graph = self._graph(file, net, parts, text) if onnx else None
        atomic_write(file, content)
        if graph is not None:
            atomic_write(file.with_suffix(".onnx"), graph)
        work, dense_work, spent = self._costs(net, parts, batch)
        exported = ExportedModel(
            model=name,
            client=whose,
            file=file,
            card=file.with_suffix(".md"),
            onnx=None if graph is None else file.with_suffix(".onnx"),
            parameters=sizes["parameters"],
            parameters_dense=sizes["parameters_dense"],
            bits=sizes["bits"],
            bytes=len(content),
            bytes_dense=len(content) - sizes["bytes_packed"] + sizes["bytes_dense"],
            bytes_fp32=len(content) - sizes["bytes_packed"] + sizes["bytes_fp32"],
            bytes_onnx=None if graph is None else len(graph),
            multiply_adds=work,
            multiply_adds_dense=dense_work,
            test_accuracy=accuracies.get(name),
            accuracies=accuracies,
            latency=spent,
        )
        atomic_write(exported.card, model_card(Card.model_validate(text), exported.file).encode())
        return exported

    def _graph(self, file: Path, net: Net, parts: tuple[Part, ...], facts: dict[str, str]) -> bytes:
        """Return the ONNX file of a model."""
        x = self._inputs(_SAMPLES)
        try:
            return onnx_file(self._network(net, parts), x, described(facts))
        except BadInput as error:
            name = json.loads(facts["network"])["name"] or "the model that was given"
            raise BadInput(
                f"{file.with_suffix('.onnx')}: not written, {name}: {error}; export without --onnx"
            ) from error

    def _inputs(self, count: int) -> Tensor:
        """Return so many inputs, from the first on and over again."""
        x = self._plain.samples(np.arange(count) % len(self._plain.x))[0]
        return x.to(self._federation.dtype) if x.is_floating_point() else x

    def _network(self, net: Net, parts: tuple[Part, ...], *, dense: bool = False) -> nn.Module:
        """Return the network of a model, for inputs as they are."""
        return assembled(net, parts, self._inputs(1), self._federation.data.moments, dense)

    def _models(self, client: int | None) -> dict[str, tuple[Part, ...]]:
        """Return the models of a client by name; what all share is, of several servers, their mean."""
        if client is None:
            return packed_models(self._simulation, self._tuned, int(self._federation.data.seen[0]), None)
        return packed_models(self._simulation, self._tuned, client, int(self._simulation.homes[client]))

    def _accuracies(self, client: int | None) -> dict[str, float]:
        """Return test accuracies by model, of a client or as means over seen ones; also that of training alone.

        Of several servers' mean there are none: clients were scored with their own server's model.
        """
        if client is None and self._simulation.homes.any():
            return {}
        found = _accuracies(self._result, client)
        alone = {} if self._alone is None else _accuracies(self._alone, client)
        return found | ({"local": alone["personal"]} if "personal" in alone else {})

    def _costs(self, net: Net, parts: tuple[Part, ...], batch: int | None) -> tuple[int, int, Latency | None]:
        """Return multiply-adds as exported and dense; with a batch, the time they take."""
        x = self._inputs(batch or 1)
        if net not in self._dense_work:
            self._dense_work[net] = multiply_adds(self._network(net, parts, dense=True), x[:1])
        work = dense_work = self._dense_work[net]
        networks: dict[str, nn.Module] = {}
        if low_rank(parts):
            networks["exported"] = self._network(net, parts)
            work = multiply_adds(networks["exported"], x[:1])
        if batch is None:
            return work, dense_work, None
        networks["dense"] = self._network(net, parts, dense=True)
        spent = latency(networks, x)
        exported = spent.get("exported", spent["dense"])  # else it is the same network
        return work, dense_work, Latency(spent["dense"], exported, batch, torch.get_num_threads())


def _recipe(run: Path) -> Recipe:
    """Return the recipe of a finished run, as a machine without the run's accelerator or first stage can prepare it."""
    path = run / "recipe.toml"
    if not path.exists():
        inside = sorted(str(child.parent) for child in run.glob("*/recipe.toml"))
        remedy = f"export one of those in it: {listed(inside)}" if inside else "it has no recipe.toml"
        raise BadInput(f"{run}: not the directory of a run; {remedy}")
    recipe = Recipe.read(path)
    if not (run / "result.json").exists():
        rounds = RunDirectory(run).checkpoint().rounds
        raise BadInput(
            f"{run}: not finished ({rounds} of {recipe.rounds} rounds done); finish it with: {resume_command(run)}"
        )
    # Where it started no longer matters: the last checkpoint has it all.
    return recipe.model_copy(update={"start": None, "engine": recipe.engine.model_copy(update={"device": "cpu"})})


def _accuracies(result: Result, client: int | None) -> dict[str, float]:
    """Return what result.json says of the models for a client, or on average over the seen ones."""
    names = ("global", "personal", "tuned")
    if client is None:
        rows = {row["model"]: row for row in result.rows if (row["clients"], row["split"]) == ("seen", "test")}
        return {name: float(rows[name]["accuracy"]) for name in names if name in rows}
    place = result.columns["client"].index(client)
    values = {name: result.columns.get(f"{name}_test_accuracy", {place: None})[place] for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _alone(run: Path, recipe: Recipe) -> Result | None:
    """Return the result of local training on the same split, if the run's comparison has it; not that of a variant."""
    comparison = run.resolve().parent
    if not (comparison / COMPARISON_FILE).exists():
        return None
    split = read_json(run / "split.json")["fingerprint"]
    for path in sorted(comparison.glob("*/result.json")):
        values = read_toml(path.with_name("recipe.toml"))
        local = (values["method"]["name"], values.get("label"), values["seed"]) == ("local", None, recipe.seed)
        if local and path.parent != run.resolve() and read_json(path.with_name("split.json"))["fingerprint"] == split:
            return Result.load(path.parent)
    return None


def _check_objects(run: Path, given: list[str]) -> None:
    begun = read_json(run / "environment.json")["objects"]
    if given != begun:
        call = "".join(f", {name}=…" for name in begun)
        what = f"was begun in Python with objects ({', '.join(begun)})" if begun else "was begun without objects"
        raise BadInput(f"{run}: {what}; export it in Python: personafl.export({str(run)!r}{call})")


def _origin(job: Job) -> Origin:
    fed = job.federation
    network = shared_network(job.recipe, fed.algorithm, fed.data)
    if "model" in job.objects:
        network = SharedNetwork(**network.model_dump(include=set(SharedNetwork.model_fields)) | {"name": ""})
    return Origin(job.recipe, fed.learners, fed.algorithm.name, network)


def _check_data(run: Path, data: FederatedData) -> None:
    before, now = read_json(run / "split.json")["fingerprint"], data.fingerprint
    if before != now:
        raise BadInput(
            f"{run}: the data are not those of the run (split {before[:12]}, now {now[:12]}); "
            f"put them back, or if they were an object: personafl.export({str(run)!r}, data=…)"
        )


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
