"""The simulator: rounds of any algorithm over a dealt data set, and the scoring of the models that come out.

It knows nothing of any method: it groups a cohort by problem, runs the client rule on chunks of clients, joins the
uploads, and lets the server rule step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.func import vmap

from personafl.core import rng, tree, wire
from personafl.core.algorithm import Algorithm, Problem, Reduced, reduce
from personafl.core.tree import Params, Tree
from personafl.data.federated import FederatedData, Ragged
from personafl.errors import Diverged
from personafl.evaluate.score import Scores, score_personal, score_shared
from personafl.runs.cohort import Sampling, draw_cohort
from personafl.runs.engine import Engine, gather
from personafl.runs.store import Store

__all__ = ["Federation", "Round", "Simulation"]

Weights = Literal["examples", "uniform"]
Clients = NDArray[np.int64]


@dataclass(frozen=True)
class Federation:
    """Who learns what, how: all that decides the numbers of a run."""

    algorithm: Algorithm
    data: FederatedData
    problems: tuple[Problem, ...]  # all with the same `net`
    problem_of: Clients  # [clients] which problem each one solves
    engines: tuple[Engine, ...]  # one per problem
    seed: int
    cohort: int
    sampling: Sampling
    weights: Weights
    dtype: torch.dtype


@dataclass(frozen=True)
class Round:
    """What a round did: mean training loss over its clients, how many they were, bytes down and up."""

    number: int
    loss: float
    clients: int
    bytes_down: int
    bytes_up: int


class Simulation:
    """A federation in progress: the server's state and every client's."""

    def __init__(self, federation: Federation, store: Store, server_bytes: bytes | None = None) -> None:
        self.federation = federation
        self.store = store
        net, self._device = federation.problems[0].net, federation.data.x.device
        start = self._cast(net.init(rng.generator(federation.seed, "start")))
        self.server = _plain(federation.algorithm.server.init(start, len(federation.data.seen)))
        if server_bytes is not None:
            self.server = tree.map(lambda leaf: leaf.to(self._device), wire.decode(server_bytes, self.server))
        self._shapes: dict[int, Tree] = {}  # problem -> a state, for its structure

    def step(self, number: int) -> Round:
        """Run one round."""
        fed, rule = self.federation, self.federation.algorithm.client
        cohort = draw_cohort(fed.data.seen, fed.cohort, fed.sampling, fed.seed, number)
        message = fed.algorithm.server.broadcast(self.server)
        down = wire.dense(message)
        joined: Reduced | None = None
        bytes_up = 0
        for which, clients in self._groups(cohort):
            problem, engine = fed.problems[which], fed.engines[which]
            data = gather(fed.data, clients, rule.phases, fed.seed, number)
            states = self._states(which, down, clients)
            states, uploads = engine.train(_bound(rule.update, problem), down, states, data)
            self._check(f"round {number + 1}: training", clients, (states, uploads))
            self._keep(clients, states)
            bytes_up += wire.size_of_one(uploads) * len(clients)
            part = reduce(uploads, data.examples if fed.weights == "examples" else torch.ones_like(data.examples))
            joined = part if joined is None else joined.plus(part)
        loss = float("nan")
        if joined is not None:
            self.server = _plain(fed.algorithm.server.update(self.server, joined, number))
            self._check_server(number)
            loss = float(joined.mean().loss)
        return Round(number, loss, len(cohort), wire.size(message) * len(cohort), bytes_up)

    def score(
        self, clients: Clients, splits: dict[str, Ragged], number: int, personalize: bool
    ) -> dict[tuple[str, str], Scores]:
        """Score the models of clients after `number` rounds: {(model, split): per-client scores}.

        A client without a stored state is a newcomer: its state starts fresh and, with `personalize`, is fine-tuned.
        Without, newcomers have the shared model only, and a personal score needs every client to have a state.
        """
        fed, rule = self.federation, self.federation.algorithm.client
        down = wire.dense(fed.algorithm.server.broadcast(self.server))
        parts: dict[tuple[str, str], list[tuple[Clients, Scores]]] = {}
        for which, members in self._groups(clients):
            problem = fed.problems[which]
            for group in self._by_history(members):
                states = self._states(which, down, group)
                if int(group[0]) not in self.store and personalize and rule.tuning:
                    data = gather(fed.data, group, rule.tuning, fed.seed, number)
                    states = fed.engines[which].train(_bound(rule.personalize, problem), down, states, data)
                    self._check(f"after round {number}: fine-tuning", group, states)
                models = self._personal_models(problem, down, states)
                for split, rows in splits.items():
                    for name, params in models.items():
                        scores = score_personal(problem.personal_net, problem.loss, params, fed.data, rows, group)
                        parts.setdefault((name, split), []).append((group, scores))
        shared = rule.models(fed.problems[0], down, self._shape(0, down)).get("global")
        result = {key: _in_order(clients, pieces) for key, pieces in parts.items()}
        if shared is not None:
            problem = fed.problems[0]
            for split, rows in splits.items():
                result["global", split] = score_shared(problem.net, problem.loss, shared, fed.data, rows, clients)
        return result

    def _groups(self, clients: Clients) -> Iterator[tuple[int, Clients]]:
        """Cut clients into chunks that solve one problem and fit memory."""
        kinds = self.federation.problem_of[clients]
        for which in np.unique(kinds):
            for chunk in self.federation.engines[which].chunks(clients[kinds == which]):
                yield int(which), chunk

    def _by_history(self, clients: Clients) -> Iterator[Clients]:
        known = np.array([int(client) in self.store for client in clients], dtype=bool)
        yield from (part for part in (clients[known], clients[~known]) if len(part))

    def _personal_models(self, problem: Problem, down: Tree, states: Tree) -> dict[str, Params]:
        """Return the stacked personal models, if the states have any."""
        rule = self.federation.algorithm.client
        if not tree.leaves(states):
            return {}

        def own(state: Tree) -> dict[str, Params]:
            models = rule.models(problem, down, state)
            return {name: params for name, params in models.items() if name != "global"}

        result: dict[str, Params] = vmap(own)(states)
        return result

    def _states(self, which: int, down: Tree, clients: Clients) -> Tree:
        """Return the stacked states of clients, fresh for those who have none."""
        fed = self.federation
        shape = self._shape(which, down)
        if not tree.leaves(shape):
            return shape
        flat = []
        for client in map(int, clients):
            if client in self.store:
                flat.append(self.store.get(client))
            else:
                fresh = fed.algorithm.client.init(fed.problems[which], down, rng.generator(fed.seed, "init", client))
                flat.append(tree.flatten(self._cast(fresh)))
        return tree.unflatten(
            shape, {path: torch.stack([entry[path].to(self._device) for entry in flat]) for path in flat[0]}
        )

    def _shape(self, which: int, down: Tree) -> Tree:
        if which not in self._shapes:
            problem = self.federation.problems[which]
            self._shapes[which] = self.federation.algorithm.client.init(problem, down, rng.generator("shape"))
        return self._shapes[which]

    def _keep(self, clients: Clients, states: Tree) -> None:
        flat = {path: leaf.cpu() for path, leaf in tree.flatten(states).items()}
        if flat:
            self.store.put([int(client) for client in clients], flat)

    def _cast(self, values: Tree) -> Tree:
        """Move fresh parameters to the run's device and precision."""
        return tree.map(lambda leaf: leaf.to(self._device, self.federation.dtype), values)

    def _check(self, what: str, clients: Clients, result: Tree) -> None:
        good = tree.finite(result, len(clients)).numpy()
        if not good.all():
            names = [self.federation.data.client_names[client] for client in clients[~good]]
            listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise Diverged(
                f"{what} gave non-finite numbers for clients {listed}; lower training.lr or set training.clip"
            )

    def _check_server(self, number: int) -> None:
        if not all(bool(torch.isfinite(leaf).all()) for leaf in tree.leaves(self.server)):
            raise Diverged(f"round {number + 1}: the shared model became non-finite; lower the server's learning rate")


def _plain(state: Tree) -> Tree:
    """Lay tensors out in memory as a checkpoint restores them: kernels may round other layouts differently."""
    return tree.map(torch.Tensor.contiguous, state)


def _bound(rule: Any, problem: Problem) -> Any:
    return lambda down, state, data: rule(problem, down, state, data)


def _in_order(clients: Clients, pieces: list[tuple[Clients, Scores]]) -> Scores:
    """Join the scores of groups in the order of `clients`; those of nobody's group count no samples."""
    place = {int(client): row for row, client in enumerate(clients)}
    accuracy, loss = np.full(len(clients), np.nan), np.full(len(clients), np.nan)
    samples = np.zeros(len(clients), dtype=np.int64)
    for members, scores in pieces:
        rows = [place[int(client)] for client in members]
        accuracy[rows], loss[rows], samples[rows] = scores.accuracy, scores.loss, scores.samples
    return Scores(accuracy, loss, samples)
