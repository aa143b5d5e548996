"""A method whose messages can be followed by hand: each client is sent its number, and a number to begin with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from personafl.core.algorithm import Algorithm, ClientRule, Own, Problem, Reduced, ServerRule, mean_dtypes, sent_once
from personafl.core.batches import Data, Steps
from personafl.core.tree import Params


@sent_once("begin")
class Told(NamedTuple):
    """Down: the model, and of each client its number and 100 more, of nobody in particular −1 and −2."""

    model: Params
    number: Tensor
    begin: Params


class Kept(NamedTuple):
    """State: what it began with and the sum of what it was told since."""

    begun: Tensor
    heard: Tensor


class Answer(NamedTuple):
    """Up: the number again."""

    number: Tensor
    loss: Tensor


class Heard(NamedTuple):
    """State of the server: the model, and how often whose number was sent back."""

    model: Params
    times: Tensor  # [20]


@dataclass(frozen=True)
class Client(ClientRule):
    phases: ClassVar[Any] = {"local": Steps(steps=1, batch=1)}
    tuning: ClassVar[Any] = {"local": Steps(steps=1, batch=1)}

    def expects(self, problem: Problem, start: Params) -> Told:
        like = next(iter(start.values()))
        return Told(start, like.new_zeros(()), {"it": like.new_zeros(1)})

    def init(self, problem: Problem, down: Told, generator: torch.Generator) -> Kept:
        return Kept(down.begin["it"], torch.zeros_like(down.number))

    def update(self, problem: Problem, down: Told, state: Kept, data: Data) -> tuple[Kept, Answer]:
        assert not down.begin  # who has a state is not sent it again
        return Kept(state.begun, state.heard + down.number), Answer(1 * down.number, 0 * down.number)

    def personalize(self, problem: Problem, down: Told, state: Kept, data: Data) -> Kept:
        return Kept(state.begun, state.heard + 1000 * down.number)

    def models(self, problem: Problem, down: Told, state: Kept) -> dict[str, Params]:
        return {"personal": {name: w + 0 * state.heard for name, w in down.model.items()}}


@dataclass(frozen=True)
class Server(ServerRule):
    needs_each: ClassVar[bool] = True

    def init(self, problem: Problem, start: Params, population: float) -> Heard:
        return Heard(start, next(iter(start.values())).new_zeros(20))

    def broadcast(self, state: Heard) -> Told:
        return Told(state.model, state.times.new_full((), -1.0), {"it": state.times.new_full((1,), -2.0)})

    def address(self, state: Heard, clients: Any) -> Own:
        numbers = torch.from_numpy(clients).to(state.times)
        return {"number": numbers, "begin": {"it": numbers.unsqueeze(1) + 100}}

    def join_from(
        self, state: Heard, joined: Reduced | None, stacked: Answer, weights: Tensor, clients: Any, round_: int
    ) -> Reduced:
        assert stacked.number.tolist() == clients.tolist()
        times = torch.zeros(20, dtype=torch.float64)
        times[clients] = 1.0
        part = Heard({}, times), stacked.loss.double().sum()
        total = _Sum(*part)
        found = Reduced(total, weights.sum(), len(clients), mean_dtypes(total))
        return found if joined is None else joined.plus(found)

    def update(self, state: Heard, uploads: Reduced, round_: int) -> Heard:
        return Heard(state.model, state.times + uploads.total.heard.times.to(state.times))


class _Sum(NamedTuple):
    heard: Heard
    loss: Tensor


def numbered(training: Any = None) -> Algorithm:
    """Each client is sent its number."""
    return Algorithm("numbered", Client(), Server())
