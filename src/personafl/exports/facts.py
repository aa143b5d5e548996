"""What a model file says of the model in it, taken from what made it: the facts of a `modelfile.Card`."""

import json
from typing import Any, NamedTuple

import torch

from personafl.core import wire
from personafl.core.net import Net
from personafl.models.modelfile import Part, bits_of, network_text
from personafl.models.network import Network, SharedNetwork
from personafl.recipe.recipe import Recipe
from personafl.simulate.trainer import Learners


class Origin(NamedTuple):
    """What made a model: the recipe, the clients, the name of the method, and the network that all share."""

    recipe: Recipe
    learners: Learners
    method: str
    network: SharedNetwork

    def net(self, client: int | None) -> Net:
        """Return the network of a client's own model; None: the shared one."""
        who = self.learners
        return who.problems[0].net if client is None else who.problems[int(who.problem_of[client])].personal_net


def facts_of(origin: Origin, client: int | None) -> dict[str, Any]:
    """Return the method, the network and the data of a client's model; None: of what all share."""
    data = origin.learners.data
    shape = data.shape
    return {
        "method": origin.method,
        "network": network_text(_network(origin, client)),
        "dtype": str(origin.learners.dtype).removeprefix("torch."),
        "task": shape.task,
        "input_shape": json.dumps(shape.input_shape),
        "target_shape": json.dumps(shape.target_shape),
        "classes": shape.classes,
        "vocabulary": shape.vocabulary,
        "moments": None if data.moments is None else data.moments.model_dump_json(),
    }


def sizes_of(dtype: torch.dtype, net: Net, parts: tuple[Part, ...]) -> dict[str, Any]:
    """Return the sizes of a model whose numbers are of a type."""

    def dense(kind: torch.dtype) -> int:
        like = {name: torch.empty(shape, dtype=kind, device="meta") for name, shape in net.shapes.items()}
        return wire.size((like,))

    return {
        "parameters": wire.parameters(parts),
        "parameters_dense": net.parameters,
        "bytes_packed": wire.size(parts),
        "bytes_dense": dense(dtype),
        "bytes_fp32": dense(torch.float32),
        "bits": bits_of(parts),
    }


def _network(origin: Origin, client: int | None) -> Network:
    who = origin.learners
    if client is None or origin.net(client) is origin.net(None):
        return origin.network
    own = origin.recipe.devices[int(who.problem_of[client])].model
    assert own is not None
    return own.resolved(who.data)
