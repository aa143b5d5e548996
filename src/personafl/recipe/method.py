"""The sections [method] and [pretrain] of a recipe, and the methods that they name."""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field

from personafl.algorithms import METHODS
from personafl.algorithms.training import Training
from personafl.core.algorithm import Algorithm
from personafl.errors import BadInput, did_you_mean
from personafl.options import Named, Strict, checked, import_path, users_code
from personafl.recipe.training import TrainingSection


class MethodSection(Named):
    """Which method; further keys are the method's own options."""

    name: str = "fedavg"


class PretrainSection(Strict):
    """Stage (a): train a shared model first, without personal parts or adapters, and start from it."""

    rounds: Annotated[int, Field(ge=0)] = 0  # 0: no such stage
    method: MethodSection = MethodSection()
    training: TrainingSection | None = None  # None: as in the main stage


def build_method(name: str, options: Mapping[str, Any], training: Training, where: str) -> Algorithm:
    """Return a method by name with the options that a recipe gives."""
    build = find_method(name, f"{where}.name")
    given = checked(build, options, where, beside=["name"])
    with users_code(f"{where}: {name!r} cannot be made"):
        algorithm = build(training, **given)
    if not isinstance(algorithm, Algorithm):
        raise BadInput(f"{where}.name: {name!r} made a {type(algorithm).__name__}, not an Algorithm")
    return algorithm


def find_method(name: str, where: str, beside: Iterable[str] = ()) -> Callable[..., Algorithm]:
    """Return what builds a method: one of ours by name, or the user's own as package.module:name."""
    if name in METHODS:
        return METHODS[name].build
    if ":" not in name:
        raise BadInput(f"{where}: no method {name!r}; {did_you_mean(name, [*METHODS, *beside])}")
    found: Callable[..., Algorithm] = import_path(name, where)
    return found
