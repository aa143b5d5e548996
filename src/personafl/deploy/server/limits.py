"""What a coordinator believes of a server: no more than the devices that it may have could send.

A server checks each update by itself; of these bounds those of their sum, and of a server's model, follow.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from personafl.core import tree, wire
from personafl.core.tree import Params, Tree
from personafl.deploy.net.messages import Code, Refused
from personafl.deploy.server.agreement import Sum, cloud_name
from personafl.deploy.server.opening import upload_like
from personafl.recipe.cloud import CloudSection
from personafl.recipe.deploy import DeploySection
from personafl.simulate.federation import Federation

_ROUNDED = 1 + 1e-6  # sums are rounded


class Limits:
    """The bounds of what servers hand in."""

    def __init__(self, federation: Federation, cloud: CloudSection, section: DeploySection) -> None:
        self._members, self._bound = cloud.members, section.norm_bound
        largest = dataclasses.replace(
            federation.roster, samples=lambda clients: np.full_like(clients, section.max_samples)
        )
        self._heaviest = float(largest.weights_of(np.zeros(1, dtype=np.int64))[0])  # that a device may be
        update = tree.flatten(wire.dense(upload_like(federation, federation.problems[0])))
        self._counted = {name for name, leaf in update.items() if leaf.is_floating_point()}

    def move(self, devices: Mapping[str, int]) -> None:
        """Note which server devices of others have now."""
        members = [set(own) - devices.keys() for own in self._members or ()]
        for name, server in devices.items():
            members[server].add(name)
        self._members = tuple(tuple(own) for own in members)

    def check_weight(self, server: int, weight: float) -> None:
        """Refuse a server whose devices would weigh more than they can."""
        if weight < 1 or (self._members is not None and weight > len(self._members[server]) * self._heaviest):
            raise Refused(Code.BAD_SAMPLES, f"the devices of {cloud_name(server)} cannot weigh {weight:.6g}")

    def check_clients(self, server: int, clients: int) -> None:
        """Refuse updates of nobody, or of more devices than a server has."""
        if clients < 1:
            raise Refused(Code.BAD_SAMPLES, f"{cloud_name(server)} hands in the updates of nobody")
        if self._members is not None and clients > len(self._members[server]):
            text = f"{cloud_name(server)} hands in the updates of {clients} devices, and has fewer by cloud.members"
            raise Refused(Code.BAD_SAMPLES, text)

    def check_sum(self, server: int, handed: Sum, clients: int, joined: int) -> None:
        """Refuse a sum that so many updates cannot have; `joined` is what all devices weighed when a server joined."""
        weight = float(handed.weight)
        most = clients * self._heaviest if self._members is None else min(joined, clients * self._heaviest)
        if not 0 < weight <= most * _ROUNDED:
            text = f"the {clients} devices of {cloud_name(server)} cannot weigh {weight:.6g}"
            raise Refused(Code.BAD_SAMPLES, text)
        means = {name: leaf for name, leaf in tree.flatten(handed.total).items() if name in self._counted}
        self._check_norm(f"the mean of {cloud_name(server)}'s updates", _norm(means) / weight, self._bound)

    def check_model(self, server: int, handed: Tree, sent: Tree, rounds: int) -> None:
        """Refuse a model that is too far from the one that a server was sent, so many rounds ago."""
        after, before = tree.flatten(handed), tree.flatten(sent)
        change = {name: leaf.double() - before[name] for name, leaf in after.items() if leaf.is_floating_point()}
        bound = rounds * max(self._bound, _norm(before))
        self._check_norm(f"the change of {cloud_name(server)}'s model", _norm(change), bound)

    def _check_norm(self, what: str, norm: float, bound: float) -> None:
        if not norm <= bound * _ROUNDED:
            raise Refused(Code.NORM_TOO_LARGE, f"the norm of {what} is {norm:.3g}, at most {bound:.3g} is taken")


def _norm(named: Params) -> float:
    leaves = [leaf for leaf in named.values() if leaf.is_floating_point()]
    return math.sqrt(sum(float(leaf.double().square().sum()) for leaf in leaves))
