"""Dealing a recipe's data: a file for each device, and the recipe that their server needs."""

import json
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from personafl.cloud.topology import place
from personafl.data.build import load
from personafl.data.federated import FederatedData
from personafl.data.inputs import moments_for, scale_for
from personafl.deploy.device.datafile import ABOUT, FORMAT, SPLITS
from personafl.recipe.devices import device_names
from personafl.recipe.recipe import Recipe
from personafl.runs.profiles import deal as deal_devices
from personafl.storage.files import atomic_write, storage
from personafl.storage.seals import sealed


def deal(recipe: Recipe, out: Path) -> tuple[Recipe, list[Path]]:
    """Deal a recipe's data to one file per client that trains; return the recipe that a server of theirs needs.

    The files are device-N.safetensors, N the number that the client has in the simulator; by it the recipe says which
    server of a cloud each belongs to.
    """
    data = load(recipe.data, recipe.seed)
    kinds = deal_devices(recipe.devices, data, recipe.seed)
    names = device_names(recipe.devices)
    section = {**(recipe.deploy.model_dump() if recipe.deploy else {}), **data.shape.model_dump(exclude_none=True)}
    values = recipe.model_dump(mode="json", exclude_none=True)
    moments = moments_for(data, recipe.data)
    if moments is not None:  # a server has no data to take them from
        values["data"]["normalize"] = moments.model_dump(exclude_none=True)
    if (scale := scale_for(data, recipe.data)) is not None:
        values["data"]["scale"] = scale.model_dump(exclude_none=True)
    for key in (
        "task",
        "classes",
        "features",
        "categories",
        "missing",
    ):  # so that a device may also bring a file of its own
        if (known := getattr(data.reading, key)) is not None:
            values["data"][key] = known
    if recipe.cloud is not None:
        homes = place(data, recipe.cloud.servers, recipe.cloud.members, recipe.cloud.active, recipe.seed).devices
        values["cloud"]["members"] = [[str(number) for number in own] for own in homes]
    elif recipe.deploy is None:
        section["devices"] = len(data.seen)
    served = Recipe.parse({**values, "deploy": section})
    with storage(out):
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = []
    for client in map(int, data.seen):
        profile = names[int(kinds[client])] if names else None
        files.append(out / f"device-{client}.safetensors")
        atomic_write(files[-1], *sealed(_packed(data, client, profile)), private=True)
    atomic_write(out / "recipe.toml", served.to_toml().encode())
    return served, files


def _packed(data: FederatedData, client: int, profile: str | None) -> bytes:
    rows = [data.rows(split)[client] for split in SPLITS]
    every = np.concatenate(rows)
    ends = np.cumsum([len(part) for part in rows])
    about = {
        **{key: getattr(data, key) for key in ABOUT},
        "reading": data.reading.model_dump(mode="json", exclude_none=True),
        "client": data.client_names[client],
        "number": client,
        "profile": profile,
    }
    named = {"x": data.x[every].contiguous(), "y": data.y[every].contiguous(), "ends": torch.from_numpy(ends)}
    return safetensors.torch.save(named, {"format": FORMAT, "about": json.dumps(about)})
