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
from personafl.data.describe import sketch
from personafl.data.federated import FederatedData
from personafl.errors import BadInput
from personafl.recipe.compare import CompareSection
from personafl.recipe.recipe import Recipe
from personafl.simulate.federation import Federation
from personafl.storage.files import read_json
from personafl.storage.rundir import RunDirectory


@dataclass(frozen=True)
class Job:
    """A run that is ready to start: everything was checked."""

    recipe: Recipe
    federation: Federation
    objects: tuple[str, ...] = ()  # what was given as an object, so that the recipe alone cannot repeat the run

    def files(self) -> dict[str, str]:
        """The first files of its run directory."""
        data = self.federation.data
        split = {
            "fingerprint": data.fingerprint,
            "name": data.name,
            "clients": data.clients,
            "seen": data.seen.tolist(),
            "unseen": data.unseen.tolist(),
            "notes": list(data.notes),
            "normalize": None if data.moments is None else data.moments.model_dump(),
            "samples": {name: data.rows(name).sizes.tolist() for name in ("train", "validation", "test")},
            "picture": sketch(data),
        }
        return {
            "recipe.toml": self.recipe.to_toml(),
            "environment.json": json.dumps({**_environment(), "objects": list(self.objects)}, indent=1),
            "split.json": json.dumps(split),
        }

    def check_begun(self, directory: RunDirectory) -> None:
        """Refuse to continue a run as a different one: the result would belong to neither."""
        before = Recipe.read(directory.path / "recipe.toml")
        old, new = (recipe.model_copy(update={"compare": CompareSection()}) for recipe in (before, self.recipe))
        if old.to_toml() != new.to_toml():
            keys = ", ".join(key for key in Recipe.model_fields if getattr(old, key) != getattr(new, key))
            raise BadInput(f"{directory.path}: was begun with another recipe (see {keys}); choose another --out")
        begun = read_json(directory.path / "environment.json")
        objects = begun["objects"]
        if list(self.objects) != objects:
            call = ", ".join(f"{name}=…" for name in objects) or "neither model nor algorithm"
            raise BadInput(
                f"{directory.path}: was begun in Python with {call}; "
                "continue it there: personafl.run(…, the same arguments, resume=True)"
            )
        torch.set_num_threads(begun["threads"])  # more or fewer may sum in another order


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
