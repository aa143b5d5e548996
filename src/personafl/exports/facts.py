"""What a model file says of the model in it, taken from the job that made it: the facts of a `modelfile.Card`."""

import json
from typing import Any

import torch

from personafl.core import wire
from personafl.core.net import Net
from personafl.models.modelfile import Part, bits_of, network_text
from personafl.models.network import Network, SharedNetwork
from personafl.runs.job import Job
from personafl.runs.problems import shared_network


def facts_of(job: Job, client: int | None) -> dict[str, Any]:
    """Return the method, the network and the data of a client's model; None: of what all share."""
    federation, data = job.federation, job.federation.data
    shape = data.shape
    return {
        "method": federation.algorithm.name,
        "network": network_text(_network(job, client)),
        "dtype": str(federation.dtype).removeprefix("torch."),
        "task": shape.task,
        "input_shape": json.dumps(shape.input_shape),
        "target_shape": json.dumps(shape.target_shape),
        "classes": shape.classes,
        "vocabulary": shape.vocabulary,
        "moments": None if data.moments is None else data.moments.model_dump_json(),
    }


def sizes_of(job: Job, net: Net, parts: tuple[Part, ...]) -> dict[str, Any]:
    """Return the sizes of a model."""

    def dense(dtype: torch.dtype) -> int:
        like = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in net.shapes.items()}
        return wire.size((like,))

    return {
        "parameters": wire.parameters(parts),
        "parameters_dense": net.parameters,
        "bytes_packed": wire.size(parts),
        "bytes_dense": dense(job.federation.dtype),
        "bytes_fp32": dense(torch.float32),
        "bits": bits_of(parts),
    }


def net_of(job: Job, client: int | None) -> Net:
    """Return the network of a client's own model; None: the shared one."""
    federation = job.federation
    if client is None:
        return federation.problems[0].net
    return federation.problems[int(federation.problem_of[client])].personal_net


def _network(job: Job, client: int | None) -> Network:
    fed = job.federation
    if client is not None and net_of(job, client) is not net_of(job, None):
        own = job.recipe.devices[int(fed.problem_of[client])].model
        assert own is not None
        return own.resolved(fed.data)
    network = shared_network(job.recipe, fed.algorithm, fed.data)
    if "model" in job.objects:
        return SharedNetwork(**network.model_dump(include=set(SharedNetwork.model_fields)) | {"name": ""})
    return network
