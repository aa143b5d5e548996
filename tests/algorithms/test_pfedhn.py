"""pFedHN by hand, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from personafl.algorithms import Training
from personafl.algorithms.averaging import Change
from personafl.algorithms.pfedhn import Hyper, HyperState, made, pfedhn
from personafl.core import tree
from personafl.core.algorithm import Empty
from personafl.core.batches import Steps
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.testing import make_case

START = {"w": torch.tensor([[1.0, 2.0, 3.0]]).double(), "b": torch.tensor([4.0]).double()}
CHANGES = {
    "w": torch.tensor([[[1.0, 0.0, 2.0]], [[0.0, -1.0, 1.0]]]).double(),
    "b": torch.tensor([[3.0], [0.5]]).double(),
}
WEIGHTS = torch.tensor([1.0, 3.0]).double()
ALPHA = 0.1


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def state() -> HyperState:
    """Two layers of width 3, vectors of 2 numbers; clients 4 and 7 are known."""
    layers = {"0.weight": drawn(3, 2), "0.bias": drawn(3), "1.weight": drawn(3, 3), "1.bias": drawn(3)}
    heads = {"w": drawn(1, 3, 3), "b": drawn(1, 3)}
    vectors = torch.tensor([[0.3, -1.0], [2.0, 0.5]]).double()
    return HyperState(Hyper(layers, heads, START), torch.tensor([4, 7]), vectors, torch.tensor(5))


def by_hand(φ: Hyper, v: Tensor) -> Tensor:
    """θ as one vector: w, then b."""
    z = φ.layers["1.weight"] @ torch.relu(φ.layers["0.weight"] @ v + φ.layers["0.bias"]) + φ.layers["1.bias"]
    w = [START["w"][0, k] + φ.heads["w"][0, k] @ z for k in range(3)]
    return torch.stack([*w, START["b"][0] + φ.heads["b"][0] @ z])


def server(**options: Any) -> Any:
    return pfedhn(Training(), server_lr=ALPHA, vector=2, width=3, layers=2, **options).server


def test_each_client_is_sent_what_the_network_makes_of_its_vector() -> None:
    own = server().address(state(), np.array([7, 4]))["model"]
    for row, client in enumerate((1, 0)):
        expected = by_hand(state().hyper, state().vectors[client])
        torch.testing.assert_close(torch.cat([own["w"][row, 0], own["b"][row]]), expected, rtol=0, atol=1e-14)
    common = server().broadcast(state()).model
    expected = by_hand(state().hyper, state().vectors.mean(0))
    torch.testing.assert_close(torch.cat([common["w"][0], common["b"]]), expected, rtol=0, atol=1e-14)


def test_a_step_is_the_papers() -> None:
    """φ + α Σ p_i (∂θ_i/∂φ)ᵀ Δθ_i and v_i + α (∂θ_i/∂v_i)ᵀ Δθ_i, by whole Jacobians; client 9 is new."""
    before, rule = state(), server()
    clients = np.array([7, 9])
    vectors = rule.vectors_of(before, clients)
    torch.testing.assert_close(vectors[0], before.vectors[1])
    uploads = Change(CHANGES, torch.tensor([1.0, 5.0]).double())
    after = rule.update(before, rule.join_from(before, None, uploads, WEIGHTS, clients, 0), 0)

    moved = torch.cat([CHANGES["w"][:, 0], CHANGES["b"]], 1)  # [clients, 4]
    leaves, spec = torch.utils._pytree.tree_flatten(before.hyper)
    expected = [leaf.clone() for leaf in leaves]
    for row, share in enumerate((0.25, 0.75)):

        def h(*parts: Tensor, row: int = row) -> Tensor:
            return by_hand(torch.utils._pytree.tree_unflatten(parts, spec), vectors[row])

        for place, jacobian in enumerate(torch.autograd.functional.jacobian(h, tuple(leaves))):
            if place < len(leaves) - 2:  # START is a constant in `by_hand`
                expected[place] += ALPHA * share * torch.tensordot(moved[row], jacobian, 1)
        slope = torch.autograd.functional.jacobian(lambda v: by_hand(before.hyper, v), vectors[row])
        torch.testing.assert_close(
            after.vectors[row + 1], vectors[row] + ALPHA * moved[row] @ slope, rtol=0, atol=1e-13
        )
    found = tree.leaves(after.hyper)
    for one, other in zip(found[:-2], expected[:-2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
    mean = 0.25 * moved[0] + 0.75 * moved[1]  # ∂θ/∂θ_0 is 1
    torch.testing.assert_close(after.hyper.start["w"][0] - START["w"][0], ALPHA * mean[:3], rtol=0, atol=1e-13)
    torch.testing.assert_close(after.hyper.start["b"] - START["b"], ALPHA * mean[3:], rtol=0, atol=1e-13)
    assert after.clients.tolist() == [4, 7, 9]
    torch.testing.assert_close(after.vectors[0], before.vectors[0])


def test_uploads_join_in_any_order_and_the_loss_is_their_mean() -> None:
    rule, whole, apart = server(), None, None
    uploads, clients = Change(CHANGES, torch.tensor([1.0, 5.0]).double()), np.array([7, 9])
    whole = rule.join_from(state(), None, uploads, WEIGHTS, clients, 0)
    for row in (1, 0):
        one = tree.map(lambda leaf, row=row: leaf[row : row + 1], uploads)
        apart = rule.join_from(state(), apart, one, WEIGHTS[row : row + 1], clients[row : row + 1], 0)
    assert whole.loss() == apart.loss() == 4.0  # (1 + 3·5)/4
    assert whole.clients == apart.clients == 2
    one, other = (tree.flatten(rule.update(state(), joined, 0)) for joined in (whole, apart))
    for path, leaf in one.items():
        torch.testing.assert_close(leaf, other[path], rtol=0, atol=1e-13)


def test_it_begins_at_the_start_and_vectors_are_drawn_from_that() -> None:
    """As N(0, 1), by the client's number and by what the run's seed drew."""
    rule = pfedhn(Training()).server
    first = rule.init(None, START, 1.0)
    own = made(first.hyper, rule.vectors_of(first, np.array([0, 5])))
    assert all(value[row].equal(START[name]) for name, value in own.items() for row in range(2))
    many = rule.vectors_of(first, np.arange(1000))
    assert float(many.mean()) == pytest.approx(0.0, abs=0.03)
    assert float(many.std()) == pytest.approx(1.0, abs=0.03)
    other = rule.init(None, tree.scale(START, 2.0), 1.0)
    assert not rule.vectors_of(other, np.arange(3)).equal(many[:3])
    assert rule.vectors_of(first, np.array([2, 0])).equal(many[[2, 0]])


def test_a_client_sends_how_training_moved_its_own_and_keeps_nothing() -> None:
    """One full-batch step of SGD: Δθ_i = −η ∇f_i(θ_i)."""
    net = Net(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    training = Training(work=Steps(steps=1, batch=None), optimizer=Sgd(lr=0.5))
    case = make_case(pfedhn(training))
    down, kept, data = case.one_client(2)
    after, up = case.update(down, kept, data)
    assert after == Empty()
    batch = next(data.phases["local"].each())
    slope = torch.func.grad(case.problem.mean_loss)(down.model, batch)
    for name, value in up.change.items():
        torch.testing.assert_close(value, -0.5 * slope[name], rtol=0, atol=1e-13)
    assert case.algorithm.client.models(case.problem, down, after)["personal"] is down.model
    assert net.parameters == 650
