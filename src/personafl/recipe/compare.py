"""The section [compare] of a recipe."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from personafl.algorithms import METHODS
from personafl.errors import BadInput
from personafl.options import Positive, Strict, checked
from personafl.recipe.method import find_method
from personafl.storage.files import read_json, write_json

TUNING_VALIDATION = 0.2  # of training data, where the recipe holds none out and methods are tuned
_TUNED_FILE = "tuned.json"  # of a comparison that is tuned


class CompareSection(Strict):
    """What `personafl compare` runs: methods × seeds.

    `options.NAME` are a method's own options. `variants.NAME` names a changed recipe: its values replace the recipe's,
    and NAME can stand among the methods.
    """

    methods: tuple[str, ...] = ("fedavg", "local", "finetune", "ditto")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    tune: Positive | None = None  # trials of each method, by validation data, before its runs; None: as the recipe says
    pick: bool = False  # also say which method validation data pick, and how far from the best on test data it is

    @field_validator("methods", "seeds")
    @classmethod
    def _distinct(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if not values:
            raise ValueError("give at least one")
        if twice := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"{twice[0]!r} is there twice")
        return values

    def check(self) -> None:
        """Fail if a method or one of its options does not exist."""
        for name, variant in self.variants.items():
            if not isinstance(variant.get("method", {}), dict):
                raise BadInput(
                    f"compare.variants.{name}.method: is a section; write compare.variants.{name}.method.name=…"
                )
            if not name or "/" in name or name.startswith("."):
                raise BadInput(f"compare.variants: {name!r} would name no directory; leave out '/' and a first '.'")
        for name in self.methods:
            if name not in {*self.variants, *METHODS}:  # else it is there, and imported when it is asked for
                find_method(name, "compare.methods", self.variants)
        for name, options in self.options.items():
            checked(find_method(name, "compare.options"), options, f"compare.options.{name}")


class Tuned(Strict):
    """What tuning chose for a method: recipe keys and their values, and accuracies on validation data."""

    values: dict[str, Any]
    accuracy: float | None  # None: no trial came to its end
    default: float | None  # of the recipe's own values

    @property
    def words(self) -> str:
        """It as a line of text."""
        values = ", ".join(f"{key.rpartition('.')[2]}={value:.4g}" for key, value in self.values.items())
        if self.accuracy is None:
            return f"{values}, as no trial came to its end"
        default = "failed" if self.default is None else f"{100 * self.default:.2f} %"
        return f"{values} ({100 * self.accuracy:.2f} % on validation data; untuned {default})"


def read_tuned(comparison: Path) -> dict[str, Tuned]:
    """Return what was chosen for the methods of a comparison that are tuned by now."""
    file = comparison / _TUNED_FILE
    return {label: Tuned(**values) for label, values in read_json(file).items()} if file.exists() else {}


def write_tuned(comparison: Path, chosen: Mapping[str, Tuned]) -> None:
    """Keep what was chosen."""
    write_json(comparison / _TUNED_FILE, {label: tuned.model_dump() for label, tuned in chosen.items()})
