"""What scoring has done with chunks of clients, in this process or by workers: models made of states, and tried."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from personafl.core import tree
from personafl.core.algorithm import NOTHING_OWN, Own, given
from personafl.core.tree import Params, Tree
from personafl.data.federated import Clients, Ragged, Rows
from personafl.evaluate.choice import Gains
from personafl.evaluate.score import Outcomes, Scores, try_personal, try_shared
from personafl.simulate.trainer import Learners, StatesOnNodes, Trainer

SHARES = (0.25, 0.5, 0.75)  # of the personal model, in the blends that a device may choose
Splits = Mapping[str, Ragged]  # rows by the name of their split
Message = str | Warning  # what there is to warn of


class TriedShared(NamedTuple):
    """What became of clients' samples with the shared model, by split."""

    outcomes: dict[str, Outcomes]
    told: tuple[Message, ...]


class TryShared(NamedTuple):
    """Have the model that clients share tried on their rows."""

    clients: Clients
    down: Tree
    rows: Splits  # of these clients alone
    problem: int = 0
    states: Tree = ()  # the model needs none
    own: Own = NOTHING_OWN  # nor is it of anyone alone

    def done_by(self, trainer: Trainer) -> TriedShared:
        """Try it."""
        who, params, places = trainer.learners, trainer.global_model(self.down), _places(self.rows)
        assert params is not None  # else it is not tried
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            tried = {
                split: try_shared(who.problems[0], params, who.data, rows, places) for split, rows in self.rows.items()
            }
        return TriedShared(tried, tuple(each.message for each in told))


class TriedOwn(NamedTuple):
    """Scores of clients by (model, split), and by model what it gains on validation data over the shared one."""

    scores: dict[tuple[str, str], Scores]
    gains: dict[str, Gains]
    told: tuple[Message, ...]


class TryOwn(NamedTuple):
    """Have clients' own models tried on their rows: of clients that are alike.

    With `shared`, what became of their validation samples with the shared model, gains over it are counted, and blends
    with it are tried too.
    """

    problem: int
    clients: Clients
    down: Tree
    states: Tree | StatesOnNodes  # stacked; nothing of newcomers that are fine-tuned
    tuned: Tree  # stacked; nothing if they are not fine-tuned
    known: bool  # whether they have a model after the rounds
    twice: bool  # whether there are clients that have models from both
    rows: Splits  # of these clients alone
    shared: Outcomes | None
    own: Own  # of each client in what it receives

    def done_by(self, trainer: Trainer) -> TriedOwn:
        """Try them."""
        problem, data, places = trainer.learners.problems[self.problem], trainer.learners.data, _places(self.rows)
        scores: dict[tuple[str, str], Scores] = {}
        gains: dict[str, Gains] = {}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for name, params in self._models(trainer):
                for split, rows in self.rows.items():
                    if split == "train" and name.startswith("blend"):
                        continue  # nobody asks
                    own = try_personal(problem, params, data, rows, places)
                    scores[name, split] = own.scores()
                    if self.shared is not None and split == "validation":
                        gains[name] = own.gains_over(self.shared)
        return TriedOwn(scores, gains, tuple(each.message for each in told))

    def _models(self, trainer: Trainer) -> Iterator[tuple[str, Params]]:
        """Yield the stacked models of clients, one kind after the other: they may be large."""
        models: dict[str, Params] = {}
        for name, states in (("personal", self.states), ("tuned" if self.known else "personal", self.tuned)):
            params = _personal(trainer.learners, self.problem, self.down, self.own, states)
            if params is not None:
                models[name] = params
        if self.twice and "tuned" not in models:  # a newcomer, among clients that have both
            models["tuned"] = models["personal"]
        yield from models.items()
        last = models.get("tuned", models.get("personal"))
        base = trainer.global_model(self.down) if self.shared is not None else None
        if base is not None and last is not None:
            for share in SHARES:
                yield f"blend {share}", blend(base, last, share)


def warn(told: Iterable[Message]) -> None:
    """Warn of what there is to warn of, of each thing once."""
    for message in {str(each): each for each in told}.values():
        warnings.warn(message, stacklevel=2)


def _places(rows: Splits) -> Rows:
    """Return the clients of rows that are of a chunk's clients alone."""
    return np.arange(len(next(iter(rows.values()))))


def _personal(who: Learners, which: int, down: Tree, own: Own, states: Any) -> Params | None:
    """Return the personal models of stacked states, or of what clients without any are sent, if they have them."""
    rule, problem, both = who.rule, who.problems[which], (own, states)

    def models(beside: tuple[Own, Tree]) -> dict[str, Params]:
        mine, state = beside
        return rule.models(problem, given(down, mine), state)

    if type(states) is tuple or not tree.leaves(both) or "personal" not in models(tree.take(both, 0)):
        return None
    found: Params = vmap(lambda beside: models(beside)["personal"])(both)
    return found


def blend(shared: Params, stacked: Params, share: float) -> Params:
    """Return mixtures of the shared and each own model; what all clients have in common stays one tensor, expanded."""

    def mixed(name: str, own: Tensor) -> Tensor:
        if own.stride(0):
            return torch.lerp(shared[name].expand_as(own), own, share)
        return torch.lerp(shared[name], own[0], share).expand_as(own)

    return {name: mixed(name, own) for name, own in stacked.items()}
