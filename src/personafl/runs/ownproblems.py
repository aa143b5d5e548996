"""What the clients of a run solve where a recipe has kinds of devices: a problem for each kind."""

import dataclasses

import torch
from torch import nn

from personafl.core.algorithm import Problem
from personafl.core.net import Net
from personafl.data.federated import FederatedData
from personafl.errors import BadInput
from personafl.models import make_net
from personafl.models.adapters import is_adapter
from personafl.models.network import Network
from personafl.recipe.recipe import Recipe
from personafl.uploads.ranks import check_rank


def problems_of(
    recipe: Recipe,
    shared: Problem,
    data: FederatedData,
    model: nn.Module | None,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Problem, ...]:
    """Return the problem of each kind, given what they have in common; `model` has replaced the recipe's network."""
    net = shared.net
    made = []
    if model is None and not any(map(is_adapter, net.shapes)):
        made.append((recipe.model.whole.resolved(data), net))
    problems = []
    for index, profile in enumerate(recipe.devices):
        local = shared.local_net
        if profile.model is not None:
            other = _own_net(made, profile.model.resolved(data), data, f"devices[{index}]").to(device, dtype)
            local = None if other is net else other
        if profile.rank is not None:
            check_rank(profile.rank, net.shapes, f"devices[{index}].rank")
        own = dataclasses.replace(shared, local_net=local, bits=profile.bits, penalty=profile.penalty)
        problems.append(dataclasses.replace(own, rank=profile.rank))
    return tuple(problems)


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
