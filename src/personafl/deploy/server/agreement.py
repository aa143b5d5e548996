"""What the servers of a cloud and their coordinator agree on: names, the recipe, and what a server hands in.

Server n is `cloud-n`. Where all servers have one model (sync), the coordinator has it: a server hands in the sum of its
devices' updates, or what its robust rule makes of them times what they weigh, and gets the new state. Else each server
has a model of its own: it hands in what of its state is mixed, gets the mean back, and takes its devices' updates
itself. Where it would mix and step several times on the same updates (K_z), it hands in its whole state and that sum,
and the coordinator takes the steps of all who are mixed.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from personafl.core import tree, wire
from personafl.core.algorithm import mean_dtypes
from personafl.core.tree import Tree
from personafl.deploy.net.messages import digest_of
from personafl.deploy.server.opening import check_moments, upload_like
from personafl.errors import BadInput
from personafl.recipe.cloud import CloudSection
from personafl.recipe.recipe import Recipe
from personafl.recipe.robust import RobustSection
from personafl.runs.addressing import check_addressed
from personafl.runs.robust import check_uploads, held
from personafl.simulate.cloud import check_iterations
from personafl.simulate.federation import Federation

_AGREED: dict[str, Any] = {
    **dict.fromkeys(
        ("rounds", "seed", "method", "training", "model", "federation", "devices", "uplink", "robust"), True
    ),
    **dict.fromkeys(("cloud", "deploy"), True),
    "data": {"normalize", "scale", "augment"},
}


class Sum(NamedTuple):
    """The updates of a server's devices: Σ weightᵢ·upᵢ and Σ weightᵢ, in float64."""

    total: Tree
    weight: Tensor


class Whole(NamedTuple):
    """A server's state, with what is its own, and the updates of its devices."""

    state: Tree
    sum: Sum


def sum_like(federation: Federation) -> tuple[Sum, Tree]:
    """Return a sum of updates, for its structure, and the types of their mean."""
    update = wire.dense(upload_like(federation, federation.problems[0]))
    total = tree.map(lambda leaf: leaf.to(torch.float64), update)
    return Sum(total, torch.zeros((), dtype=torch.float64)), mean_dtypes(update)


def deployable_cloud(recipe: Recipe) -> CloudSection:
    """Return the recipe's `[cloud]`; fail if it asks for what only the simulator does."""
    cloud = recipe.cloud
    if cloud is None:
        raise BadInput("cloud: missing; a coordinator has several servers: cloud.servers=3 (a single one needs none)")
    check_moments(recipe, "a coordinator")
    algorithm = recipe.algorithm()
    check_addressed(recipe, algorithm)
    check_iterations(cloud, algorithm)
    if cloud.active is not None:
        check_uploads(held(recipe, algorithm, 1), cloud.active)
    for index, profile in enumerate(recipe.devices):
        if profile.penalty is not None:
            raise BadInput(
                f"devices[{index}].penalty: is for the simulator and for one server: several count devices by their "
                "samples; remove it, and set method.penalty"
            )
    return cloud


def without_cloud(recipe: Recipe) -> Recipe:
    """Return what the devices of a server run: to them it is the only one."""
    return recipe.model_copy(update={"cloud": None})


def at_the_coordinator(recipe: Recipe) -> Recipe:
    """Return what a coordinator runs: one that has the model is handed in what rules of servers made of updates."""
    own = without_cloud(recipe)
    shared = recipe.cloud is not None and recipe.cloud.shared
    return own.model_copy(update={"robust": RobustSection()}) if shared else own


def fingerprint(recipe: Recipe) -> str:
    """Return the digest of all that servers and their coordinator must have in common."""
    return digest_of(recipe.model_dump_json(include=_AGREED).encode())


def cloud_name(place: int) -> str:
    """Return the name that the certificate of a server must have."""
    return f"cloud-{place}"


def place_of(name: str, cloud: CloudSection) -> int | None:
    """Return which server of a cloud has a name; None: none of them."""
    names: dict[str, Any] = {cloud_name(place): place for place in range(cloud.servers)}
    return names.get(name)


def home_of(name: str, cloud: CloudSection) -> int | None:
    """Return the server that `cloud.members` has for a device; None: none."""
    members = cloud.members or ()
    return next((place for place, names in enumerate(members) if name.removeprefix("device-") in names), None)
