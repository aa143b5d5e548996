"""A run that is ready to start, and what its directory says of it."""

import json
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from personafl import __version__
from personafl.core.tasks import task_named
from personafl.data.advice import inputs_line
from personafl.data.describe import sketch
from personafl.data.federated import FederatedData
from personafl.errors import BadInput
from personafl.latency.waiting import ALONE
from personafl.options import defaults
from personafl.recipe.compare import CompareSection
from personafl.recipe.method import find_method
from personafl.recipe.recipe import Recipe
from personafl.simulate.federation import Federation
from personafl.storage.files import read_json
from personafl.storage.rundir import RunDirectory

FIRST_DEFAULTS: dict[str, dict[str, Any]] = {
    "apfl": {"mixing": 0.5},
    "ditto": {"pull": 0.1},
    "fedbcd": {"penalty": 1.0, "server_step": 0.5},
    "fedbcdi": {"penalty": 0.2},
    "fedrep": {"head_epochs": 10},
    "perfedavg": {"inner_lr": 0.01, "tune_epochs": "1 step"},
    "pfedme": {"pull": 15.0, "outer_lr": 0.005},
}


@dataclass(frozen=True)
class Job:
    """A run that is ready to start: everything was checked."""

    recipe: Recipe
    federation: Federation
    objects: tuple[str, ...] = ()  # what was given as an object, so that the recipe alone cannot repeat the run

    @property
    def notes(self) -> list[str]:
        """What the user should know of the data and the networks."""
        found = [each.unstackable for each in self.federation.problems] if self.recipe.engine.strategy == "auto" else []
        why = [f"clients are trained one by one: torch.func cannot batch {one}" for one in dict.fromkeys(found) if one]
        cloud = self.recipe.cloud
        alone = [f"cloud.first = {ALONE}"] if cloud is not None and cloud.first == 1 < cloud.servers else []
        return [*self.federation.data.notes, *why, *alone]

    def files(self) -> dict[str, str]:
        """The first files of its run directory."""
        data = self.federation.data
        split = {
            "fingerprint": data.fingerprint,
            "name": data.name,
            "clients": data.clients,
            "seen": data.seen.tolist(),
            "unseen": data.unseen.tolist(),
            "notes": self.notes,
            "inputs": inputs_line(data, self.recipe.data),
            "normalize": None if data.moments is None else data.moments.model_dump(),
            "scale": None if data.scale is None else data.scale.model_dump(),
            "score": task_named(data.task).score,
            "samples": {name: data.rows(name).sizes.tolist() for name in ("train", "validation", "test")},
            "picture": sketch(data),
        }
        return {
            "recipe.toml": self.recipe.to_toml(),
            "environment.json": json.dumps(
                {**_environment(), "objects": list(self.objects), "defaults": self._defaults()}, indent=1
            ),
            "split.json": json.dumps(split),
        }

    def check_begun(self, directory: RunDirectory) -> None:
        """Refuse to continue a run as a different one: the result would belong to neither."""
        before = Recipe.kept(directory.path / "recipe.toml")
        old, new = (recipe.model_copy(update={"compare": CompareSection()}) for recipe in (before, self.recipe))
        if old.to_toml() != new.to_toml():
            keys = ", ".join(key for key in Recipe.model_fields if getattr(old, key) != getattr(new, key))
            raise BadInput(f"{directory.path}: was begun with another recipe (see {keys}); choose another --out")
        begun = read_json(directory.path / "environment.json")
        now = self._defaults()
        for key, before in begun.get("defaults", self._first_defaults()).items():
            if key in now and now[key] != before:
                raise BadInput(
                    f"{directory.path}: was begun when {key} was {json.dumps(before)} by default, and now it is "
                    f"{json.dumps(now[key])}; continue it with the personafl that began it, or begin a new run"
                )
        torch.set_num_threads(begun["threads"])  # more or fewer may sum in another order

    def _defaults(self) -> dict[str, Any]:
        """What the recipe leaves to the method and to the choice of a network: another version may do it otherwise."""
        model, method, given = self.recipe.model, self.recipe.method, self.recipe.method.options
        found: dict[str, Any] = {}
        if "algorithm" not in self.objects:
            options = defaults(find_method(method.name, "method.name"))
            found = {f"method.{name}": value for name, value in options.items() if name not in given}
        if "model" not in self.objects and model.name == "auto":
            found["model"] = model.resolved(self.federation.data).model_dump(exclude_none=True)
        plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
        return plain

    def _first_defaults(self) -> dict[str, Any]:
        """The same in run directories of version 0.1, which do not say it: what has changed since."""
        before = FIRST_DEFAULTS.get(self.recipe.method.name, {})
        return {"model": "a plain MLP, bag or window"} | {f"method.{name}": value for name, value in before.items()}


def _environment() -> dict[str, Any]:
    """What a run depends on besides its recipe."""
    packages = ("torch", "numpy", "scikit-learn", "safetensors")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": sys.argv,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "packages": {"personafl": __version__, **{name: version(name) for name in packages}},
    }


def check_split(path: Path, data: FederatedData, remedy: str = "") -> None:
    """Refuse to go on with a run, or with what belongs to it, on other data; `remedy` says what to do."""
    if (path / "split.json").exists():
        before, now = read_json(path / "split.json")["fingerprint"], data.fingerprint
        if before != now:
            raise BadInput(
                f"{path}: the data changed since the run began (split {before[:12]}, now {now[:12]}){remedy}"
            )
