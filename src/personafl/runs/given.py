"""What was given as an object in Python, in place of what a recipe names."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

import personafl.data.build as data_build
from personafl.core.algorithm import Algorithm
from personafl.core.losses import Loss, Metric
from personafl.data.federated import FederatedData
from personafl.data.sources import Dataset
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.storage.files import read_json

OBJECTS_FILE = "objects.json"  # of a comparison that was begun with objects; a run has them in environment.json


@dataclass(frozen=True, eq=False)
class Given:
    """Objects given in Python. They are not in a run directory, which has their names: give them again to go on."""

    data: FederatedData | Dataset | None = None  # dealt already, or to be dealt as the recipe says
    model: nn.Module | None = None
    algorithm: Algorithm | None = None
    loss: Loss | None = None  # (outputs, targets) -> one for each sample, which is trained in place of the task's
    metrics: Mapping[str, Metric] | None = None  # scored of each client beside the task's own

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the objects that were given."""
        return tuple(field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not None)

    def dealt(self, recipe: Recipe) -> FederatedData:
        """Return the data of a run as its clients have them."""
        if isinstance(self.data, FederatedData):
            return self.data
        if self.data is None:
            return data_build.load(recipe.data, recipe.seed)
        return data_build.federate(self.data, recipe.data, recipe.seed)


NOTHING = Given()


def objects_of(path: Path) -> list[str]:
    """Return with which objects a run or comparison was begun."""
    if (path / OBJECTS_FILE).exists():
        return list(read_json(path / OBJECTS_FILE))
    file = path / "environment.json"
    return list(read_json(file)["objects"]) if file.exists() else []


def check_objects(path: Path, given: Given, call: str) -> None:
    """Fail if a run or comparison is opened without the objects that it was begun with; `call` is what to do.

    Data that are given in place of the same data in a file do no harm: their fingerprints are compared.
    """
    begun = objects_of(path)
    if extra := [f"{name}=…" for name in given.names if name not in ("data", *begun)]:
        raise BadInput(f"{path}: was begun without {' and '.join(extra)}; leave that out")
    if set(begun) - set(given.names):
        what = ", ".join(f"{name}=…" for name in begun)
        remedy = call.format(path=repr(str(path)), objects=what)
        raise BadInput(f"{path}: was begun in Python with objects ({what}); {remedy}")
