"""What the arguments of a call mean: a recipe, and the objects that stand in place of what it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from personafl.core.algorithm import Algorithm
from personafl.data.config import parse_partition
from personafl.data.federated import FederatedData
from personafl.data.sources import Dataset
from personafl.data.sources.memory import in_memory, is_client, kind_of
from personafl.data.sources.registry import IN_PYTHON
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.recipe.values import put, read_toml
from personafl.runs.given import Given

RecipeLike = Recipe | Mapping[str, Any] | str | Path
# of columns that are there already
_TAKEN = ("accuracy", "loss", "samples", "word_error", "rmse", "mae", "exact", "perplexity")
_PLAIN = (str, int, float, bool, list, dict, type(None), Path)


class Objects(NamedTuple):
    """What a call gives in place of what a recipe names, unchecked; a model may be a name too."""

    model: Any = None
    algorithm: Any = None
    loss: Any = None
    metrics: Any = None


def as_recipe(recipe: RecipeLike) -> Recipe:
    """Return a recipe given as itself, as nested dicts, or as a TOML file's path."""
    if isinstance(recipe, Recipe):
        return recipe
    return Recipe.parse(*_values(recipe))


def understood(
    first: Any,
    *,
    data: Any,
    recipe: RecipeLike | None,
    objects: Objects,
    user: Any,
    label: str | Sequence[str] | None,
    partition: str | Mapping[str, Any] | None,
    settings: Mapping[str, Any] | None,
    changes: Mapping[str, Any],
) -> tuple[Recipe, Given]:
    """Return the recipe of a call and what was given; `changes` are keys of the recipe that have an argument."""
    data, recipe = _sorted_out(first, data, recipe)
    named = data if isinstance(data, str | Path) else None
    found = {
        **changes,
        "data.source": None if named is None else str(named),
        "data.user": user if isinstance(user, str) else None,
        "data.label": _column("label", label),
        "data.partition": _partition(partition),
        **_model_keys(objects.model),
        **_checked_settings(settings),
    }
    found = {key: value for key, value in found.items() if value is not None}
    if isinstance(recipe, Recipe) and not found:
        whole = recipe
    else:
        values, where = _values({} if recipe is None else recipe)
        for key, value in found.items():
            put(values, key, value)
        whole = Recipe.parse(values, where)
    if named is not None or data is None:
        if user is not None and not isinstance(user, str):
            raise BadInput("user: with data in a file give the name of the column that says whose a row is")
        return whole, given_of(whole, None, None, objects)
    given = given_of(whole, data, user, objects)
    if not isinstance(data, FederatedData | Dataset):
        source = whole.data.model_copy(update={"source": f"{IN_PYTHON}{kind_of(data)}"})
        whole = whole.model_copy(update={"data": source})
    return whole, given


def given_of(recipe: Recipe, data: Any, user: Any, objects: Objects) -> Given:
    """Return the objects of a call, checked; data are read as the recipe says."""
    model, algorithm, loss, metrics = objects
    if isinstance(model, type):
        raise BadInput(f"model: is the class {model.__name__}; give a network of it: model={model.__name__}(…)")
    if not isinstance(model, nn.Module | str | Mapping | None):
        raise BadInput(f"model: is a {type(model).__name__}; give a torch.nn.Module, or the name of a model")
    if not isinstance(algorithm, Algorithm | None):
        raise BadInput(f"algorithm: is a {type(algorithm).__name__}; give a personafl Algorithm, or a name as method=…")
    module = model if isinstance(model, nn.Module) else None
    _check_functions(loss, metrics)
    if data is None or isinstance(data, Dataset | FederatedData):
        if data is not None and user is not None:
            raise BadInput("user: these data know their clients already; leave it out")
        return Given(data, module, algorithm, loss, metrics)
    if isinstance(data, str | Path):
        raise BadInput(f"data: was an object when the run began; give that, not {str(data)!r}")
    whose = None if isinstance(user, str) else user
    if isinstance(user, str) and kind_of(data) not in ("DataFrame", "datasets"):
        raise BadInput(f"user = {user!r}: data have no columns; give an array that says whose each sample is")
    return Given(in_memory(data, recipe.data.reading(), whose), module, algorithm, loss, metrics)


def _check_functions(loss: Any, metrics: Any) -> None:
    if isinstance(loss, str):
        raise BadInput(f"loss = {loss!r}: give a function of outputs and targets that returns a loss for each sample")
    check_callable(loss, "loss")
    if not isinstance(metrics, Mapping | None):
        raise BadInput(f"metrics: is a {type(metrics).__name__}; give a dict of functions, {{'name': function}}")
    for name, function in (metrics or {}).items():
        if not isinstance(name, str) or not name.isidentifier() or name in _TAKEN:
            raise BadInput(f"metrics: {name!r} cannot be the name of a metric; give one like 'macro_f1'")
        check_callable(function, f"metrics[{name!r}]")


def seeds_of(seeds: Any) -> list[int] | None:
    """Return seeds given as a list, or as a number of them: 3 are 0, 1 and 2."""
    if seeds is None:
        return None
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        if seeds < 1:
            raise BadInput(f"seeds = {seeds}: give how many, at least 1, or a list of them")
        return list(range(seeds))
    if isinstance(seeds, str | bool) or not isinstance(seeds, Sequence | np.ndarray | range):
        raise BadInput(f"seeds = {seeds!r}: give how many, as in seeds=3, or a list of them")
    return np.asarray(seeds).tolist() if isinstance(seeds, np.ndarray) else list(seeds)


def methods_of(methods: str | Sequence[str] | None) -> list[str] | None:
    """Return the methods to compare."""
    if isinstance(methods, str):
        return [part.strip() for part in methods.split(",") if part.strip()]
    if methods is not None and not (isinstance(methods, Sequence) and all(isinstance(name, str) for name in methods)):
        raise BadInput("methods: give a list of names, as in methods=['fedavg', 'ditto']; personafl.list_methods()")
    return None if methods is None else list(methods)


def method_key(method: str | Mapping[str, Any] | None, algorithm: Algorithm | None) -> dict[str, Any]:
    """Return the keys that a method given by its name, or with its options, stands for."""
    if method is None:
        return {}
    if algorithm is not None:
        raise BadInput("method and algorithm: both say what to run; give one of them")
    if isinstance(method, Mapping):
        return {"method": dict(method)}
    if not isinstance(method, str):
        raise BadInput(f"method = {method!r}: give a name, as in method='ditto'; several: personafl.compare")
    return {"method.name": method}


def path_of(path: Any, where: str) -> Path:
    """Return a path that was given as text or as itself."""
    if not isinstance(path, str | Path):
        raise BadInput(f"{where}: is a {type(path).__name__}; give a path")
    return Path(path).expanduser()


def check_callable(function: Callable[..., Any] | None, where: str) -> None:
    """Fail if what is to be called cannot be."""
    if function is not None and not callable(function):
        raise BadInput(f"{where}: is a {type(function).__name__}; give a function")


def _sorted_out(first: Any, data: Any, recipe: RecipeLike | None) -> tuple[Any, RecipeLike | None]:
    """Return data and recipe: the first argument is whichever is not given by its name, and looks like it."""
    if first is None:
        return data, recipe
    if data is not None and recipe is not None:
        raise BadInput("data and recipe are given by name; leave out the first argument")
    if recipe is not None:
        return first, recipe
    if data is not None:
        if not _is_recipe(first):
            raise BadInput("data: are given twice, as the first argument and by name; give them once")
        return data, first
    return (None, first) if _is_recipe(first) else (first, None)


def _is_recipe(value: Any) -> bool:
    """Say whether a first argument is a recipe; a dict is one unless its values are clients' data."""
    if isinstance(value, Recipe):
        return True
    if isinstance(value, str | Path):
        return str(value).endswith(".toml")
    if not isinstance(value, Mapping) or type(value).__module__.partition(".")[0] in ("datasets", "sklearn"):
        return False
    if value and all(is_client(part) for part in value.values()):
        return False
    known = any(key in Recipe.model_fields for key in value)
    return known or all(isinstance(key, str) and isinstance(part, _PLAIN) for key, part in value.items())


def _values(recipe: Any) -> tuple[dict[str, Any], str]:
    """Return a recipe's nested values, and the file that it came from."""
    if isinstance(recipe, Recipe):
        return recipe.model_dump(mode="json", exclude_none=True), ""
    if isinstance(recipe, Mapping):
        return {key: dict(part) if isinstance(part, Mapping) else part for key, part in recipe.items()}, ""
    path = path_of(recipe, "recipe")
    return read_toml(path), str(path)


def _column(key: str, name: Any) -> str | list[str] | None:
    if isinstance(name, list | tuple) and name and all(isinstance(each, str) for each in name):
        return list(name)
    if not isinstance(name, str | None):
        raise BadInput(f"{key}: is a {type(name).__name__}; give the name of a column")
    return name


def _partition(partition: Any) -> dict[str, Any] | None:
    if isinstance(partition, str):
        return parse_partition(partition)
    if not isinstance(partition, Mapping | None):
        raise BadInput(f"partition: is a {type(partition).__name__}; write it as 'dirichlet:alpha=0.1,clients=100'")
    return None if partition is None else dict(partition)


def _model_keys(model: Any) -> dict[str, Any]:
    if isinstance(model, str):
        return {"model.name": model}
    return {"model": dict(model)} if isinstance(model, Mapping) else {}


def _checked_settings(settings: Any) -> dict[str, Any]:
    if settings is None:
        return {}
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) and all(key.split(".")) for key in settings):
        raise BadInput("settings: give a dict of recipe keys, as in settings={'training.lr': 0.1}")
    return dict(settings)
