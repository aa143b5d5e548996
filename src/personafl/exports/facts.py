"""What a model file says of the model in it, taken from the job that made it: the facts of a `modelfile.Card`."""

import json
from typing import Any

import torch

from personafl.core import wire
from personafl.core.net import Net
from personafl.models import default_model
from personafl.models.modelfile import Network, Part, bits_of
from personafl.runs.job import Job


def facts_of(job: Job, client: int | None) -> dict[str, Any]:
    """Return the method, the network and the data of a client's model; None: of what all share."""
    federation, data = job.federation, job.federation.data
    tokens = not data.x.is_floating_point()
    return {
        "method": federation.algorithm.name,
        "network": _network(job, client).model_dump_json(),
        "dtype": str(federation.dtype).removeprefix("torch."),
        "task": data.task,
        "input_shape": json.dumps(list(data.x.shape[1:])),
        "target_shape": json.dumps(list(data.y.shape[1:])),
        "classes": data.classes,
        "vocabulary": (data.vocabulary or int(data.x.max()) + 1) if tokens else None,
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
    section, data = job.recipe.model, job.federation.data
    if client is not None and net_of(job, client) is not net_of(job, None):
        return _device_network(job, int(job.federation.problem_of[client]))
    own = "model" in job.objects
    return Network(
        name=None if own else default_model(data) if section.name == "auto" else section.name,
        options={} if own else section.model_extra or {},
        buffers=section.buffers,
        personal=section.personal or job.federation.algorithm.personal,
        adapter=section.adapter,
        adapter_size=section.adapter_size,
    )


def _device_network(job: Job, which: int) -> Network:
    """Return the network that a device profile has of its own."""
    section = job.recipe.devices[which].model
    assert section is not None
    return Network(
        name=section.resolved(job.federation.data).name,
        options=section.model_extra or {},
        buffers=section.buffers,
        personal=None,
        adapter=None,
        adapter_size=1,
    )
