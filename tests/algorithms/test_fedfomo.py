"""FedFomo by hand, in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from personafl.algorithms import Training
from personafl.algorithms.fedfomo import Fomo, FomoState, Others, Weighed, fedfomo
from personafl.core import tree
from personafl.core.batches import Steps
from personafl.core.optim import Sgd
from personafl.testing import Case, make_case

PLAIN = Training(work=Steps(steps=1, batch=None), optimizer=Sgd(lr=0.5))


def case(models: int = 3) -> Case:
    return make_case(fedfomo(PLAIN, models=models))


def near(params: Any, seed: int, size: float = 0.3) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return {name: w + size * torch.randn(w.shape, generator=generator, dtype=w.dtype) for name, w in params.items()}


def loss(made: Case, params: Any, client: int) -> float:
    """On all training samples of a client, without dropout."""
    rows = made.data.train.of(np.array([client]))
    outputs = made.problem.net.apply(params, made.data.x[rows])
    return float(made.problem.loss(outputs, made.data.y[rows]).mean())


def mean_loss(made: Case, params: Any) -> Tensor:
    """On all samples of all clients."""
    return made.problem.loss(made.problem.net.apply(params, made.data.x), made.data.y).mean()


def distance(a: Any, b: Any) -> float:
    return math.sqrt(sum(float((a[name] - b[name]).square().sum()) for name in a))


def test_a_client_takes_over_what_is_better_by_its_distance() -> None:
    """Two models of others, of which the third place is empty; one far and one near, and its own."""
    made = case()
    _, _, data = made.one_client(3)
    begun = made.start
    candidates = [near(begun, 1), near(begun, 2, 0.6)]
    own = begun
    for _ in range(3):  # better than it began
        slope = torch.func.grad(lambda w: mean_loss(made, w))(own)
        own = tree.sub(own, tree.scale(slope, 0.5))
    candidates[0] = tree.add(tree.scale(candidates[0], 0.1), tree.scale(own, 0.9))
    empty = tree.scale(begun, 100.0)
    models = tree.stack([*candidates, empty])
    message = Others({}, models, torch.tensor([True, True, False]))
    weights = made.algorithm.client.weights(made.problem, message, Fomo(begun, own), data.phases["look"])

    at = loss(made, begun, 3)
    expected = [max(0.0, (at - loss(made, other, 3)) / distance(other, begun)) for other in (*candidates, own)]
    total = sum(expected)
    assert total > 0
    assert min(expected[0], expected[2]) > 0
    expected = [w / total for w in (*expected[:2], 0.0, expected[2])]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)

    after, up = made.algorithm.client.update(made.problem, message, Fomo(begun, own), data)
    for name, w in begun.items():
        moved = sum(
            weight * (other[name] - w) for weight, other in zip(expected, (*candidates, empty, own), strict=True)
        )
        torch.testing.assert_close(after.begun[name], w + moved, rtol=0, atol=1e-12)
    slope = torch.func.grad(made.problem.mean_loss)(after.begun, next(data.phases["local"].each()))
    for name, w in after.model.items():
        torch.testing.assert_close(w, after.begun[name] - 0.5 * slope[name], rtol=0, atol=1e-12)
    assert up.model is after.model
    torch.testing.assert_close(up.weights, weights[:-1], rtol=0, atol=0)


def test_where_none_is_better_it_begins_where_it_began() -> None:
    """Also where all are the same: there is no distance to divide by."""
    made = case(1)
    down, first, data = made.one_client(3)
    assert not down.real.any()
    worse = tree.scale(made.start, -30.0)
    message = Others({}, tree.stack([worse]), torch.tensor([True]))
    assert loss(made, worse, 3) > loss(made, made.start, 3)
    for state in (first, Fomo(made.start, worse)):
        after, up = made.algorithm.client.update(made.problem, message, state, data)
        assert all(after.begun[name].equal(w) for name, w in made.start.items())
        assert up.weights.tolist() == [0.0]


LIKED = torch.tensor([[0.9, 0.1, 0.7, 0.2], [0, 0, 0, 0], [0.3, 0.2, 0, 0.6], [0, 0, 0, 0]]).double()
KNOWN = FomoState(
    {"w": torch.zeros(2).double()},
    torch.tensor([1, 3, 5, 8]),
    {"w": torch.tensor([[1.0, 1], [3, 3], [5, 5], [8, 8]]).double()},
    LIKED,
    torch.tensor(4),
    torch.tensor(11),
)


def server(models: int = 2, explore: float = 0.0) -> Any:
    return fedfomo(PLAIN, models=models, explore=explore).server


def test_a_client_is_sent_the_models_that_helped_it_most_and_never_its_own() -> None:
    own = server().address(KNOWN, np.array([5, 1]))
    assert own["models"]["w"][:, :, 0].tolist() == [[8, 1], [5, 8]]
    assert own["real"].all()
    few = server(models=4).address(KNOWN, np.array([1, 100]))  # 100 is new: it may have any
    assert few["real"].sum(1).tolist() == [3, 4]
    assert few["models"]["w"][0, 3].tolist() == [0, 0]
    assert server().broadcast(KNOWN).start["w"].tolist() == [4.25, 4.25]
    assert not server().broadcast(KNOWN).real.any()


def test_it_explores_as_often_as_it_says_and_breaks_ties_evenly() -> None:
    """Client 3 likes nobody: each of three others is its first as often. The first of client 1 is 5, but for ε."""
    ties, explored = [], 0
    for number in range(600):
        state = KNOWN._replace(rounds=torch.tensor(number))
        ties.append(int(server(models=1).address(state, np.array([3]))["models"]["w"][0, 0, 0]))
        explored += int(server(models=1, explore=0.3).address(state, np.array([1]))["models"]["w"][0, 0, 0]) != 5
    shares = [ties.count(client) / 600 for client in (1, 5, 8)]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.06)
    assert explored / 600 == pytest.approx(0.3 * 2 / 3, abs=0.06)


def test_the_server_keeps_models_and_adds_up_what_was_taken_over() -> None:
    """Clients 8, 5 and 2, which is new, were sent two models each."""
    rule, clients = server(), np.array([8, 5, 2])
    sent = [[int(w) for w in row] for row in rule.address(KNOWN, clients)["models"]["w"][:, :, 0]]
    weights = torch.tensor([[0.5, 0.0], [0.2, 0.8], [0.0, 1.0]]).double()
    fresh = {"w": torch.tensor([[80.0, 0], [50, 0], [20, 0]]).double()}
    uploads = Weighed(fresh, weights, torch.tensor([1.0, 2.0, 6.0]).double())
    heard = rule.join_from(KNOWN, None, uploads, torch.ones(3), clients, 4)
    assert heard.loss() == 3.0
    after = rule.update(KNOWN, heard, 4)
    assert after.clients.tolist() == [1, 2, 3, 5, 8]
    assert after.models["w"][:, 0].tolist() == [1, 20, 3, 50, 80]
    assert int(after.rounds) == 5
    place = {client: row for row, client in enumerate(after.clients.tolist())}
    expected = torch.zeros(5, 5).double()
    for row, one in enumerate((1, 3, 5, 8)):
        for column, other in enumerate((1, 3, 5, 8)):
            expected[place[one], place[other]] = LIKED[row, column]
    for row, client in enumerate(clients.tolist()):
        for column, other in enumerate(sent[row]):
            expected[place[client], place[other]] += weights[row, column]
    torch.testing.assert_close(after.liked, expected, rtol=0, atol=1e-15)


def test_before_the_first_round_nobody_has_a_model() -> None:
    rule, start = server(), {"w": torch.tensor([1.0, 2.0]).double()}
    state = rule.init(None, start, 1.0)
    own = rule.address(state, np.array([0, 1]))
    assert not own["real"].any()
    assert own["models"]["w"].shape == (2, 2, 2)
    assert rule.broadcast(state).start["w"].equal(start["w"])
    uploads = Weighed({"w": torch.ones(2, 2).double()}, torch.zeros(2, 2).double(), torch.ones(2).double())
    after = rule.update(state, rule.join_from(state, None, uploads, torch.ones(2), np.array([1, 0]), 0), 0)
    assert after.clients.tolist() == [0, 1]
    assert float(after.liked.sum()) == 0
    found: Tensor = rule.address(after, np.array([0]))["real"]
    assert found.tolist() == [[True, False]]
