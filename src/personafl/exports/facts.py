"""What a model file says of the model in it, taken from what made it: the facts of a `modelfile.Card`."""

import json
from typing import NamedTuple

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


def facts_of(
    origin: Origin,
    client: int | None,
    parts: tuple[Part, ...],
    *,
    run: str,
    model: str,
    whose: str | None,
    accuracies: dict[str, float],
) -> dict[str, str]:
    """Return what a `Card` has of a client's model, as text; client None: of what all share."""
    data, net, dtype = origin.learners.data, origin.net(client), origin.learners.dtype
    shape = data.shape

    def dense(kind: torch.dtype) -> int:
        like = {name: torch.empty(shape, dtype=kind, device="meta") for name, shape in net.shapes.items()}
        return wire.size((like,))

    facts = {
        "run": run,
        "method": origin.method,
        "network": network_text(_network(origin, client)),
        "dtype": str(dtype).removeprefix("torch."),
        "task": shape.task,
        "input_shape": json.dumps(shape.input_shape),
        "target_shape": json.dumps(shape.target_shape),
        "classes": shape.classes,
        "vocabulary": shape.vocabulary,
        "moments": None if data.moments is None else data.moments.model_dump_json(),
        "model": model,
        "client": whose,
        "parameters": wire.parameters(parts),
        "parameters_dense": net.parameters,
        "bytes_packed": wire.size(parts),
        "bytes_dense": dense(dtype),
        "bytes_fp32": dense(torch.float32),
        "bits": bits_of(parts),
        "test_accuracy": accuracies.get(model),
        "accuracies": json.dumps(accuracies),
    }
    return {key: str(value) for key, value in facts.items() if value is not None}


def _network(origin: Origin, client: int | None) -> Network:
    who = origin.learners
    if client is None or origin.net(client) is origin.net(None):
        return origin.network
    own = origin.recipe.devices[int(who.problem_of[client])].model
    assert own is not None
    return own.resolved(who.data)
