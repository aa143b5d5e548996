"""Whoever breaks a law is told which, before an executor stumbles over it."""

import threading
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from personafl.algorithms.averaging import Averaging, Change, Model, Shared
from personafl.algorithms.fedavg import FedAvgClient
from personafl.algorithms.training import Training
from personafl.core import tree
from personafl.core.algorithm import Algorithm, Empty, Own, Problem, Reduced
from personafl.core.batches import Data, Steps
from personafl.core.tree import Params
from personafl.errors import BadInput
from personafl.testing import LAWS, make_case

TRAINING = Training(work=Steps(steps=1, batch=2))


@dataclass(frozen=True, kw_only=True)
class Silent(FedAvgClient):
    """Does not say what it sends: a device would refuse to."""

    def update(self, problem, down, state, data):  # type: ignore[no-untyped-def]
        return super().update(problem, down, state, data)


@dataclass(frozen=True, kw_only=True)
class Eager(FedAvgClient):
    """Sends more once it has trained: an uplink and a server that ask first would not know."""

    def update(self, problem: Problem, down: Model, state: Empty, data: Data) -> tuple[Empty, Change]:
        state, sent = super().update(problem, down, state, data)
        return state, sent._replace(change=sent.change if len(data.phases["local"].rows) else {})


@dataclass(frozen=True, kw_only=True)
class Growing(FedAvgClient):
    """Its state grows by training: a store has one layout for all clients."""

    def update(self, problem: Problem, down: Model, state: Any, data: Data) -> tuple[Model, Change]:  # type: ignore[override]
        return down, super().update(problem, down, Empty(), data)[1]


@dataclass(frozen=True, kw_only=True)
class Inexact(FedAvgClient):
    """Packs another model than it uses."""

    def packed(self, problem: Problem, message: Model, state: Empty) -> dict[str, Any]:
        return {"global": (tree.scale(message.model, 2.0),)}


@dataclass(frozen=True, kw_only=True)
class Whole(FedAvgClient):
    """Declares (below) that it uses bits, and has none."""

    def models(self, problem: Problem, down: Model, state: Empty) -> dict[str, Params]:
        return {"personal": down.model}


@dataclass(frozen=True, kw_only=True)
class Held(FedAvgClient):
    """Has something that other processes cannot have."""

    lock: Any = field(default_factory=threading.Lock)


@dataclass(frozen=True, kw_only=True)
class Remembering(FedAvgClient):
    """Takes shorter steps the more clients it has trained: in a worker it would have trained fewer."""

    seen: list[int] = field(default_factory=list)

    def update(self, problem: Problem, down: Model, state: Empty, data: Data) -> tuple[Empty, Change]:
        self.seen.append(1)
        state, sent = super().update(problem, down, state, data)
        return state, sent._replace(change=tree.scale(sent.change, 1 / len(self.seen)))


@dataclass(frozen=True, kw_only=True)
class Counting(Averaging):
    """Declares that it averages, and looks at the weight of uploads."""

    def update(self, state: Shared, uploads: Reduced, round_: int) -> Shared:
        return super().update(state, uploads._replace(weight=uploads.weight**2), round_)


@dataclass(frozen=True, kw_only=True)
class Addressing(Averaging):
    """Sends each client its own, and says that it only averages."""

    def address(self, state: Shared, clients: Any) -> Own:
        return {"model": {name: torch.stack([w] * len(clients)) for name, w in state.model.items()}}


def breach(address: Any, joins: bool = True) -> None:
    class Broken(Addressing):
        averages: ClassVar[bool] = False
        needs_each: ClassVar[bool] = joins

        def address(self, state: Shared, clients: Any) -> Own:
            return address(super().address(state, clients), clients)  # type: ignore[no-any-return]

        def join_from(
            self, state: Shared, joined: Reduced | None, stacked: Any, weights: Tensor, clients: Any, round_: int
        ) -> Reduced:
            return self.join(state, joined, stacked, weights)

    case = make_case(Algorithm("broken", OwnModel(training=TRAINING), Broken()))
    LAWS["each_is_sent_its_own"](case)


class OwnModel(FedAvgClient):
    """Has no global model."""

    def models(self, problem: Problem, down: Model, state: Empty) -> dict[str, Params]:
        return {"personal": down.model}


def test_what_is_addressed_is_lawful() -> None:
    breach(lambda own, clients: own)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (lambda own, clients: {"models": own["model"]}, "models is addressed, and is no field of Model"),
        (lambda own, clients: tree.map(lambda leaf: leaf.float(), own), "what a client is sent is"),
        (lambda own, clients: {"model": {"2.bias": own["model"]["4.bias"]}}, "differ in"),
        (lambda own, clients: tree.map(lambda leaf: leaf * len(clients), own), "differs by"),
        (lambda own, clients: tree.map(lambda leaf: leaf[:, None], own), "what a client is sent is"),
    ],
)
def test_what_is_addressed_and_should_not_be(address: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        breach(address)


def test_a_rule_that_is_told_whose_uploads_looks_at_each() -> None:
    with pytest.raises(AssertionError, match="it has join_from, and does not say needs_each"):
        breach(lambda own, clients: own, joins=False)


def test_the_global_model_is_nobodys_own() -> None:
    def drifting(own: Own, clients: Any) -> Own:
        return tree.map(lambda leaf: leaf + torch.from_numpy(clients).reshape(-1, *[1] * (leaf.ndim - 1)), own)

    breach(drifting)
    whose = OwnModel.models
    try:
        OwnModel.models = FedAvgClient.models  # type: ignore[method-assign]
        with pytest.raises(AssertionError, match="differs by"):
            breach(drifting)
    finally:
        OwnModel.models = whose  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("client", "server", "law"),
    [
        (FedAvgClient, Addressing, "each_is_sent_its_own"),
        (Silent, Averaging, "messages_are_declared"),
        (Eager, Averaging, "structure_is_known_before_training"),
        (Growing, Averaging, "structure_is_known_before_training"),
        (Inexact, Averaging, "models_fit_their_networks"),
        (Held, Averaging, "a_copy_is_as_good"),
        (Remembering, Averaging, "a_copy_is_as_good"),
        (FedAvgClient, Counting, "who_averages_needs_the_mean_alone"),
    ],
)
def test_breach(client: type[FedAvgClient], server: type[Averaging], law: str) -> None:
    case = make_case(Algorithm("broken", client(training=TRAINING), server()))
    with pytest.raises(AssertionError):
        LAWS[law](case)


def test_bits_that_are_declared_and_not_kept() -> None:
    case = make_case(Algorithm("whole", Whole(training=TRAINING), Averaging(), uses_bits=True))
    with pytest.raises(AssertionError, match="no weight of its own model has 2 bits"):
        LAWS["devices_get_what_is_declared"](case)


def test_a_rule_may_look_at_the_samples_whatever_it_is_asked() -> None:
    """Also when a server or an uplink asks what it would send, with no step to take."""

    class Looking(FedAvgClient):
        def expects(self, problem: Problem, start: Params) -> Model:
            if not problem.data.whole:
                raise BadInput(f"looking counts classes, and the task {problem.data.task} has none")
            return super().expects(problem, start)

        def update(self, problem: Problem, down: Model, state: Empty, data: Data) -> tuple[Empty, Change]:
            batches = data.phases["local"]
            assert batches.pool_x.shape[1:] == (1, 8, 8)
            counts = torch.nn.functional.one_hot(batches.pool_y[batches.rows], problem.data.classes).sum((0, 1))
            assert counts.shape == (10,)
            return super().update(problem, down, state, data)

    case = make_case(Algorithm("looking", Looking(training=TRAINING), Averaging()))
    for law in LAWS.values():
        law(case)


def test_a_rule_that_takes_numbers_for_classes_is_told_to_refuse_them() -> None:
    class Counting(FedAvgClient):
        def update(self, problem: Problem, down: Model, state: Empty, data: Data) -> tuple[Empty, Change]:
            batches = data.phases["local"]
            torch.nn.functional.one_hot(batches.pool_y[batches.rows], problem.data.classes)
            return super().update(problem, down, state, data)

    case = make_case(Algorithm("counting", Counting(training=TRAINING), Averaging()))
    with pytest.raises(AssertionError, match=r"regression: RuntimeError.* refuse it in `expects`"):
        LAWS["other_targets_are_learned_or_refused"](case)
