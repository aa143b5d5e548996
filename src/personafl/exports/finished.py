"""A finished run, opened again: the models in it, and what is known of them."""

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from personafl.core.net import Net
from personafl.core.split import listed
from personafl.errors import BadInput
from personafl.exports.card import Origin
from personafl.models.modelfile import Part, assembled
from personafl.models.network import SharedNetwork
from personafl.recipe.recipe import Recipe
from personafl.recipe.values import read_toml
from personafl.runs.build import prepare
from personafl.runs.checkpoints import opened
from personafl.runs.given import Given, check_objects
from personafl.runs.job import Job, check_split
from personafl.runs.problems import shared_network
from personafl.runs.result import Result, chosen
from personafl.runs.scoring import score
from personafl.runs.sizes import packed_models
from personafl.storage.files import read_json
from personafl.storage.rundir import COMPARISON_FILE, RunDirectory, resume_command


class Finished:
    """A finished run and the models in it; client None stands for what all share."""

    def __init__(self, run: Path, given: Given) -> None:
        recipe = _recipe(run)
        check_objects(run, given, "open it in Python: personafl.load({path}, {objects})")
        self._data = given.dealt(recipe)  # as it is given to exported models
        remedy = f"; put them back, or if they were an object: personafl.load({str(run)!r}, data=…)"
        check_split(run, self._data, remedy)
        job, directory = prepare(recipe, self._data, given), RunDirectory(run)
        self._simulation, self._tuned = opened(job, directory, directory.checkpoint())
        self._run, self._result, self._alone = run, Result.load(run), _alone(run, recipe)
        self.origin = _origin(job)
        self.dense_work: dict[Net, int] = {}  # multiply-adds, once they are known
        self.names = job.federation.data.client_names
        content = (run / "recipe.toml").read_bytes() + (run / "result.json").read_bytes()
        self.digest = hashlib.sha256(content).hexdigest()

    def members(self, clients: Sequence[str] | None) -> list[int]:
        """Return the numbers of clients given by name."""
        if clients is None or clients == "all":
            return [] if clients is None else list(self._result.columns["client"])
        asked = [clients] if isinstance(clients, str) else clients
        data = self.origin.learners.data
        return [data.client_number(name, f"{self._run}: has") for name in dict.fromkeys(asked)]

    def has(self, client: int | None, *models: str) -> bool:
        """Say whether a client has one of the models."""
        return not self.models(client).keys().isdisjoint(models)

    def models(self, client: int | None) -> dict[str, tuple[Part, ...]]:
        """Return the models of a client by name; what all share is, of several servers, their mean."""
        if client is None:
            return packed_models(self._simulation, self._tuned, int(self.origin.learners.data.seen[0]), None)
        return packed_models(self._simulation, self._tuned, client, int(self._simulation.homes[client]))

    def choice(self, client: int) -> str:
        """Return the model that a client chose by validation data: global, personal, tuned, or "blend 0.25" and such.

        They are scored again for it, of all clients who are seen or unseen as this one is, for each learns from all.
        """
        data, caution = self.origin.learners.data, self.origin.recipe.evaluation.caution
        members = data.seen if client in data.seen else data.unseen
        if not len(data.validation.flat):
            raise BadInput(f"{self._run}: has no validation data to choose by; begin a run with data.validation = 0.2")
        with contextlib.closing(self._simulation.workers):  # this lives as long as the result of a run
            scored = score(self._simulation, self._tuned, members, {"validation": data.validation}, blends=True)
        names, picks = chosen(scored, caution)
        return names[int(picks[list(members).index(client)])] if names else ""

    def accuracies(self, client: int | None) -> dict[str, float]:
        """Return test accuracies by model, of a client or as means over seen ones; also that of training alone.

        Of several servers' mean there are none: clients were scored with their own server's model.
        """
        if client is None and self._simulation.homes.any():
            return {}
        found = _accuracies(self._result, client)
        alone = {} if self._alone is None else _accuracies(self._alone, client)
        return found | ({"local": alone["personal"]} if "personal" in alone else {})

    def privacy(self, client: int | None) -> dict[str, str]:
        """Return what a `Card` has of the privacy of clients, and of samples of one or any of them, as text."""
        row, own = next(iter(self._result.rows), {}), self._result.columns.get("sample_epsilon")
        if own is not None:
            place = None if client is None else self._result.columns["client"].index(client)
            row = {**row, "sample_epsilon": max(own) if place is None else own[place]}
        keys = ("epsilon", "delta", "assumption", "sample_epsilon", "sample_delta", "sample_covers")
        return {key: str(row[key]) for key in keys if key in row}

    def inputs(self, count: int) -> Tensor:
        """Return so many inputs, from the first on and over again."""
        x = self._data.samples(np.arange(count) % len(self._data.x))[0]
        return x.to(self.origin.learners.dtype) if x.is_floating_point() else x

    def network(self, net: Net, parts: tuple[Part, ...], *, dense: bool = False) -> nn.Module:
        """Return the network of a model, for inputs as they are."""
        data = self.origin.learners.data
        return assembled(net, parts, self.inputs(1), data.moments, dense, data.scale)


def _recipe(run: Path) -> Recipe:
    """Return the recipe of a finished run, as a machine without the run's accelerator or first stage can prepare it."""
    path = run / "recipe.toml"
    if not path.exists():
        inside = sorted(str(child.parent) for child in run.glob("*/recipe.toml"))
        remedy = f"export one of those in it: {listed(inside)}" if inside else "it has no recipe.toml"
        raise BadInput(f"{run}: not the directory of a run; {remedy}")
    recipe = Recipe.kept(path)
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


def _origin(job: Job) -> Origin:
    fed = job.federation
    network = shared_network(job.recipe, fed.algorithm, fed.data)
    if "model" in job.objects:
        network = SharedNetwork(**network.model_dump(include=set(SharedNetwork.model_fields)) | {"name": ""})
    return Origin(job.recipe, fed.learners, fed.algorithm.name, network)
