"""The section [sweep] of a recipe: which keys are tried with which values, how often, and what stops a trial early.

[sweep]
trials = 30
[sweep.keys]
training.lr = { low = 0.01, high = 1.0, log = true }
method.pull = [0.1, 1.0, 10.0]
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import Field, field_validator

from personafl.errors import BadInput, did_you_mean
from personafl.options import Positive, Strict

SWEEP_FILE = "sweep.toml"  # of a directory that has a sweep
TRIALS = 20  # if the recipe does not say
# What must be equal in all trials, or decides nothing.
_FIXED = ("name", "label", "seed", "rounds", "start", "data", "evaluation", "engine", "compare", "sweep", "tracking")


@dataclass(frozen=True, kw_only=True)
class Choices:
    """A key and the values to try; `labels` are what a study calls them."""

    key: str
    values: tuple[Any, ...]

    @property
    def labels(self) -> list[Any]:
        """The values, with lists and sections as JSON text."""
        return [json.dumps(value) if isinstance(value, list | Mapping) else value for value in self.values]

    @property
    def examples(self) -> tuple[Any, ...]:
        """What can be checked before the first trial: all of them."""
        return self.values


@dataclass(frozen=True, kw_only=True)
class Range:
    """A key and the two ends between which values are tried; whole numbers if both ends are."""

    key: str
    low: int | float
    high: int | float
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def examples(self) -> tuple[Any, ...]:
        """What can be checked before the first trial: both ends."""
        return self.low, self.high


class SweepSection(Strict):
    """What `personafl sweep` tries; the best is chosen by the mean accuracy of clients on validation data."""

    keys: dict[str, Any]  # recipe key -> values to try, or { low, high, log }
    sampler: Literal["tpe", "random", "grid"] = "tpe"  # grid: every combination of lists
    pruner: Literal["median", "hyperband", "none"] = "median"  # what stops bad trials at their scorings
    trials: Positive | None = None  # None: 20, or all of a grid
    seeds: tuple[Annotated[int, Field(ge=0)], ...] | None = None  # a trial is the mean over them; None: the recipe's

    @field_validator("seeds")
    @classmethod
    def _some(cls, values: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if values is not None and (not values or len(set(values)) < len(values)):
            raise ValueError("give at least one, each once")
        return values

    @property
    def size(self) -> int:
        """How many trials there will be."""
        if self.sampler == "grid":
            return math.prod(len(part.values) for part in space(self) if isinstance(part, Choices))
        return self.trials or TRIALS


def space(sweep: SweepSection) -> list[Choices | Range]:
    """Return the keys of a sweep with what is tried for each."""
    return [_part(key, value) for key, value in _flat(sweep.keys, "")]


def check_sweep(sweep: SweepSection | None) -> None:
    """Fail if what is to be tried cannot be, whatever the rest of the recipe."""
    if sweep is None:
        return
    parts = space(sweep)
    if not parts:
        raise BadInput("sweep.keys: names no key; give values to try, as in sweep.keys.training.lr=[0.05,0.1]")
    for part in parts:
        if (section := part.key.partition(".")[0]) in _FIXED:
            raise BadInput(f"sweep.keys.{part.key}: {section} must be the same in all trials; remove it from the keys")
        if sweep.sampler == "grid" and isinstance(part, Range):
            raise BadInput(f"sweep.keys.{part.key}: a grid has no ranges; give a list, or set sweep.sampler=tpe")
    if sweep.sampler == "grid" and sweep.trials is not None:
        raise BadInput(f"sweep.trials: a grid tries all its {sweep.size} combinations; remove it (or sampler=random)")


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield keys joined by dots; a table with low or high is a range, any other has keys of its own."""
    for key, value in values.items():
        if isinstance(value, Mapping) and not {"low", "high"} & value.keys():
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _part(key: str, value: Any) -> Choices | Range:
    where = f"sweep.keys.{key}"
    if isinstance(value, Mapping):
        return _range(key, value, where)
    if not isinstance(value, list | tuple):
        raise BadInput(f"{where}: give a list of values or {{ low, high, log }} (given: {value!r})")
    texts = [json.dumps(entry) for entry in value]
    if not texts:
        raise BadInput(f"{where}: the list is empty; give values to try")
    if twice := [text for text in texts if texts.count(text) > 1]:
        raise BadInput(f"{where}: {twice[0]} is there twice; remove one")
    return Choices(key=key, values=tuple(value))


def _range(key: str, value: Mapping[str, Any], where: str) -> Range:
    names = ("low", "high", "log")
    if unknown := [name for name in value if name not in names]:
        raise BadInput(f"{where}.{unknown[0]}: unknown key; {did_you_mean(unknown[0], names)}")
    low, high = value.get("low"), value.get("high")
    if not (_is_number(low) and _is_number(high)):
        raise BadInput(f"{where}: a range needs numbers low and high (given: {dict(value)!r})")
    found = Range(key=key, low=low, high=high, log=value.get("log", False))
    if not isinstance(found.log, bool):
        raise BadInput(f"{where}.log: input should be true or false (given: {found.log!r})")
    if found.low >= found.high:
        raise BadInput(f"{where}: low must be below high (given: {found.low} and {found.high})")
    if found.log and found.low <= 0:
        raise BadInput(f"{where}: with log = true low must be above 0 (given: {found.low})")
    return found


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
