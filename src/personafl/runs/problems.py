"""What the clients of a run solve: the networks that its recipe names, and the weights that they start from."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from personafl.core import rng, wire
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.losses import TASKS
from personafl.core.net import Net
from personafl.core.split import Split
from personafl.core.tree import Params
from personafl.data.config import Moments
from personafl.data.federated import FederatedData
from personafl.data.spelling import SPACE_NAME
from personafl.errors import BadInput
from personafl.models import make_net
from personafl.models.adapters import is_adapter
from personafl.models.network import Network, SharedNetwork
from personafl.recipe.recipe import Recipe, inputs_of

START_FILE = "global.safetensors"  # of a run directory: the shared model that came out
Maker = Callable[..., tuple[Net, Split | None]]  # as `make_net_and_split`


def make_problems(
    recipe: Recipe,
    algorithm: Algorithm,
    data: FederatedData,
    model: nn.Module | None,
    make: Maker,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Problem, ...]:
    """Return the problem of each device profile, or the one of all; `model` replaces the recipe's network."""
    net, split = _shared(recipe, algorithm, data, model, make)
    task = TASKS[data.task]
    edits = None if task.edits is None else functools.partial(task.edits, space=data.label_number(SPACE_NAME))
    shared = Problem(net.to(device, dtype), task.loss, split=split, correct=task.correct, edits=edits, data=data.shape)
    if not recipe.devices:
        return (shared,)
    made = []
    if model is None and not any(map(is_adapter, net.shapes)):
        made.append((recipe.model.whole.resolved(data), net))
    problems = []
    for index, profile in enumerate(recipe.devices):
        own = None
        if profile.model is not None:
            own = _own_net(made, profile.model.resolved(data), data, f"devices[{index}]").to(device, dtype)
        local = None if own is net else own
        problems.append(dataclasses.replace(shared, local_net=local, bits=profile.bits, penalty=profile.penalty))
    return tuple(problems)


def shared_network(recipe: Recipe, algorithm: Algorithm, data: FederatedData) -> SharedNetwork:
    """Return the network that a recipe names for all, with what "auto" and the method's own default stand for."""
    personal = recipe.model.personal or algorithm.personal
    return recipe.model.resolved(data).model_copy(update={"personal": personal})


def _shared(
    recipe: Recipe, algorithm: Algorithm, data: FederatedData, model: nn.Module | None, make: Maker
) -> tuple[Net, Split | None]:
    """Return the shared network and its split."""
    try:
        return make(shared_network(recipe, algorithm, data), data, model)
    except BadInput as error:
        if recipe.model.personal is None and str(error).startswith("model.personal:"):
            raise BadInput(f"{error} ({algorithm.personal!r} is the default of {algorithm.name})") from error
        raise


def _own_net(made: list[tuple[Network, Net]], record: Network, data: FederatedData, where: str) -> Net:
    """Return the network of a record; equal records are one network, and what there is already is in `made`."""
    for known, net in made:
        if known == record:
            return net
    try:
        made.append((record, make_net(record, data)))
    except BadInput as error:
        raise BadInput(f"{where}.{error}") from error
    return made[-1][1]


def make_start(recipe: Recipe, net: Net, moments: Moments | None) -> Params:
    """Return the weights of the shared network that the run starts from; its inputs are standardised by `moments`."""
    fresh = net.init(rng.generator(recipe.seed, "start"))
    if recipe.start is None:
        return fresh
    run = Path(recipe.start)
    start = _warm_start(run, fresh)
    if (before := inputs_of(run)) not in ("auto", moments or "none"):
        how = "as they are" if before == "none" else "standardised by other numbers"
        raise BadInput(f"start: the model of {run} saw inputs {how}; leave data.normalize out, then it is as there")
    return start


def _warm_start(run: Path, fresh: Params) -> Params:
    """Return `fresh` with the global model of a finished run put in, by name; only adapters may be missing there."""
    path = run / START_FILE
    try:
        found = wire.decode_named(path.read_bytes())
    except (OSError, BadInput) as error:
        raise BadInput(f"start: {path} cannot be read, or is damaged; give the directory of a finished run") from error
    if not found:
        raise BadInput(f"start: {run} has no global model to start from")
    wrong = sorted(name for name in found if name not in fresh or found[name].shape != fresh[name].shape)
    missing = sorted(name for name in fresh if name not in found and not is_adapter(name))
    if wrong or missing:
        names = ", ".join((wrong or missing)[:5])
        what = "does not fit this model" if wrong else "is missing there"
        raise BadInput(f"start: the model of {run} is another one: {names} {what}; use the same model as that run")
    return {name: found.get(name, value).to(value.dtype) for name, value in fresh.items()}
