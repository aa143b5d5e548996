"""IFCA: K shared models; every client finds the one that fits its data best, and trains that one.

A. Ghosh et al., *An Efficient Framework for Clustered Federated Learning*, NeurIPS 2020, Algorithm 1 with model
averaging.

    client i:  ĵ = argmin_j f_i(w_j), over its data;   w ← τ steps of SGD on f_i from w_ĵ
    server:    w_j ← w_j + Σ_{i: ĵ_i = j} p_i (w − w_j) / Σ_{i: ĵ_i = j} p_i,   for each j that some client chose

K = 1 is FedAvg. A client's model is that of its cluster; a newcomer looks for its cluster, and trains nothing. An
upload has K slots, of which one is filled, and says which: the server learns a client's cluster.

From random starts two groups of clients may choose one model, and stay there; the paper starts anew, several times.

Deviations: the loss that finds a cluster is of a pass over the training data, without dropout. Starts differ by the
order of their weights' entries (`slots`).
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from personafl.algorithms.averaging import Model
from personafl.algorithms.personal import retrained
from personafl.algorithms.slots import SlotsClient, chosen, looked_at, slots
from personafl.algorithms.training import Count, Training
from personafl.core import tree
from personafl.core.algorithm import Algorithm, Problem, Reduced, ServerRule
from personafl.core.batches import Batches, Data
from personafl.core.descend import descent
from personafl.core.tree import Params


class Cluster(NamedTuple):
    """State of a client: its cluster."""

    member: Tensor  # [K], 1 for it and 0 for the others


class InSlots(NamedTuple):
    """Up: how training moved each model (0 but for one), which one it was, and the mean training loss."""

    change: Params  # [K, …]
    member: Tensor  # [K]
    loss: Tensor


@dataclass(frozen=True, kw_only=True)
class IfcaClient(SlotsClient):
    """Client rule: find the best model, and train it."""

    uploads_of_state: ClassVar[tuple[str, ...]] = ("member",)

    def init(self, problem: Problem, down: Model, generator: torch.Generator) -> Cluster:
        """Until it looks, a client is of the first cluster."""
        first = torch.zeros((), dtype=torch.int64, device=tree.leaves(down.model)[0].device)
        return Cluster(functional.one_hot(first, self.count).to(tree.leaves(down.model)[0]))

    def update(self, problem: Problem, down: Model, state: Cluster, data: Data) -> tuple[Cluster, InSlots]:
        """Find ĵ, and train w_ĵ."""
        member = self._found(problem, down, state, data.phases["look"])
        start = chosen(down.model, member.argmax())
        optimizer = self.training.optimizer.at(data.round)
        moved, loss = descent(problem.mean_loss, start, data.phases["local"], optimizer)
        return Cluster(member), InSlots(tree.map(lambda change: _in_slot(member, change), moved), member, loss)

    def personalize(self, problem: Problem, down: Model, state: Cluster, data: Data) -> Cluster:
        """Find the cluster."""
        return Cluster(self._found(problem, down, state, data.phases["tune"]))

    def models(self, problem: Problem, down: Model, state: Cluster) -> dict[str, Params]:
        """Return the cluster's model; there is none for all."""
        return {"personal": chosen(down.model, state.member.argmax())}

    def _found(self, problem: Problem, down: Model, state: Cluster, batches: Batches) -> Tensor:
        losses, real = looked_at(problem, down.model, batches)
        total = torch.where(real.unsqueeze(-1), losses, 0.0).sum(0)  # [K]
        best = functional.one_hot(total.argmin(), self.count).to(state.member)
        return torch.where(real.any(), best, state.member)


def _in_slot(member: Tensor, change: Tensor) -> Tensor:
    return member.to(change).reshape(-1, *[1] * change.ndim) * change


@dataclass(frozen=True, kw_only=True)
class IfcaServer(ServerRule):
    """Server rule: each model is the mean of those that its clients made of it."""

    count: int = 1  # K

    def init(self, problem: Problem, start: Params, population: float) -> Model:
        """Start at K models."""
        return Model(slots(start, self.count))

    def broadcast(self, state: Model) -> Model:
        """Send them all."""
        return state

    def update(self, state: Model, uploads: Reduced, round_: int) -> Model:
        """Step each model along the mean change of its clients."""
        mean = uploads.mean()
        share = torch.where(mean.member > 0, mean.member, 1.0)  # nobody's model has no change to divide
        return Model(
            tree.map(lambda w, d: w + d / share.to(w).reshape(-1, *[1] * (w.ndim - 1)), state.model, mean.change)
        )


def ifca(training: Training, *, clusters: Count = 4) -> Algorithm:
    """Several shared models; each client finds the one that fits it best, and trains that."""
    look = retrained(training, lr=None, epochs=1).work
    client = IfcaClient(training=training, look=look, count=clusters)
    return Algorithm("ifca", client, IfcaServer(count=clusters))
