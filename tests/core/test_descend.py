"""The training loop, by hand on quadratics in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from personafl.core import prox, tree
from personafl.core.batches import Batch, Batches, Repeated, Together, Zipped
from personafl.core.descend import Quadratic, descend, descend_from, pull
from personafl.core.optim import Accelerated, Adaptive, LocalOptimizer, Sgd
from personafl.core.tree import Params

F64 = torch.float64
ROUND = torch.tensor(0)


def batches(values: list[list[float]], real: list[list[bool]] | None = None) -> Batches:
    """Batches [steps, batch] of scalars: the pool is the values in order, plus a poisoned row for padding."""
    pool = torch.tensor([v for step in values for v in step], dtype=F64)
    rows = torch.arange(len(pool)).reshape(len(values), -1) if values else torch.zeros(0, 1, dtype=torch.int64)
    mask = torch.ones(rows.shape, dtype=torch.bool) if real is None else torch.tensor(real)
    return Batches(pool, pool, rows, mask, torch.zeros(len(values), dtype=torch.int64))


def objective(params: Params, batch: Batch) -> Tensor:
    """½ mean_j (w − x_j)² over the real samples; its gradient is w − mean(x)."""
    squares = 0.5 * (params["w"] - batch.x).square()
    return torch.where(batch.real, squares, 0.0).sum() / batch.real.sum().clamp(min=1)


def w(value: float) -> Params:
    return {"w": torch.tensor(value, dtype=F64)}


def test_plain_descent_by_hand() -> None:
    """w ← w − ¼(w − x), w₀ = 0: x = 8 gives 2, x = 4 gives 2.5, x = −1.5 gives 1.5. Losses ½·64, ½·2², ½·4²."""
    got, loss = descend(objective, w(0.0), batches([[8.0], [4.0], [-1.5]]), Sgd(lr=0.25).at(ROUND))
    assert float(got["w"]) == pytest.approx(1.5, abs=1e-14)
    assert float(loss) == pytest.approx((32 + 2 + 8) / 3, abs=1e-12)
    assert loss.dtype == F64


def test_a_fixed_quadratic_contracts_geometrically() -> None:
    """On ½(w − 3)² with rate η: w_k − 3 = (1 − η)^k·(w₀ − 3)."""
    got, _ = descend(objective, w(10.0), batches([[3.0]] * 9), Sgd(lr=0.3).at(ROUND))
    assert float(got["w"]) == pytest.approx(3 + 7 * 0.7**9, abs=1e-12)


def test_momentum_by_hand() -> None:
    """b ← ½b + (w − x), w ← w − ½b from w = 0, x = 4 throughout: b = −4, w = 2; b = −2 − 2 = −4, w = 4; b = −2 + 0,
    w = 5; b = −1 + 1 = 0, w = 5.
    """
    for steps, expected in ((1, 2.0), (2, 4.0), (3, 5.0), (4, 5.0)):
        got, _ = descend(objective, w(0.0), batches([[4.0]] * steps), Sgd(lr=0.5, momentum=0.5).at(ROUND))
        assert float(got["w"]) == expected


def test_prox_by_hand_and_its_limit() -> None:
    """Proximal gradient, w ← soft(w − ½(w − 4), ½) from 0: 2 → 1.5; (1.5 + 4)/2 = 2.75 → 2.25. The limit minimises
    ½(w − 4)² + |w| (threshold t = lr·1): w = 3.
    """

    def soft(params: Params) -> Params:
        return tree.map(lambda leaf: prox.l1(leaf, 0.5), params)

    for steps, expected in ((1, 1.5), (2, 2.25), (60, 3.0)):
        got, _ = descend(objective, w(0.0), batches([[4.0]] * steps), Sgd(lr=0.5).at(ROUND), soft)
        assert float(got["w"]) == pytest.approx(expected, abs=1e-12)


def test_acceleration_by_hand() -> None:
    """y = w + ½(w − w⁻), w ← y − ½(y − 4) = ½y + 2 from w = w⁻ = 0: 2; y = 3, 3.5; y = 4.25, 4.125. The losses are
    those at y: ½·4², ½·1², ½·0.25². In the box [−3, 3]: 2; 3.5 → 3; y = 3.5, 3.75 → 3.
    """
    for box, steps, expected in ((None, 1, 2.0), (None, 2, 3.5), (None, 3, 4.125), (3.0, 2, 3.0), (3.0, 3, 3.0)):
        optimizer = Accelerated(lr=0.5, momentum=0.5, box=box).at(ROUND)
        got, _ = descend(objective, w(0.0), batches([[4.0]] * steps), optimizer)
        assert float(got["w"]) == expected
    _, loss = descend(objective, w(0.0), batches([[4.0]] * 3), Accelerated(lr=0.5, momentum=0.5).at(ROUND))
    assert float(loss) == pytest.approx((8 + 0.5 + 0.03125) / 3, abs=1e-14)


def test_the_prox_of_an_accelerated_step_acts_on_w() -> None:
    """w ← soft(y − ½(y − 4), ½), y = w + ½(w − w⁻): 1.5; y = 2.25, 2.625; and the limit is again 3."""

    def soft(params: Params) -> Params:
        return tree.map(lambda leaf: prox.l1(leaf, 0.5), params)

    for steps, expected in ((1, 1.5), (2, 2.625), (80, 3.0)):
        optimizer = Accelerated(lr=0.5, momentum=0.5).at(ROUND)
        got, _ = descend(objective, w(0.0), batches([[4.0]] * steps), optimizer, soft)
        assert float(got["w"]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["momentum", "adam", "accelerated"])
def test_going_on_from_a_state_is_not_having_stopped(name: str) -> None:
    """Two steps, then two from there with the state, end where four do; an empty step in between changes no state."""
    optimizer = SPECS[name].at(ROUND)
    values = [*DATA, [2.0, 2.5]]
    whole, _ = descend(objective, w(0.3), batches(values), optimizer)
    start = w(0.3)
    half, state, _ = descend_from(objective, start, optimizer.init(start), batches(values[:2]), optimizer)
    same, kept, _ = descend_from(objective, half, state, batches([[9.0, 9.0]], [[False, False]]), optimizer)
    rest, _, _ = descend_from(objective, same, kept, batches(values[2:]), optimizer)
    assert float(rest["w"]) == float(whole["w"])
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(state), tree.leaves(kept), strict=True))


def test_zero_steps_return_the_start() -> None:
    """Nothing to do: the start itself, and loss 0."""
    got, loss = descend(objective, w(7.0), batches([]), Sgd(lr=0.5).at(ROUND))
    assert float(got["w"]) == 7
    assert float(loss) == 0


SPECS: dict[str, LocalOptimizer] = {
    "sgd": Sgd(lr=0.1),
    "momentum": Sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": Adaptive(lr=0.1),
    "yogi": Adaptive(optimizer="yogi", lr=0.1, eps=1e-3),
    "accelerated": Accelerated(lr=0.1, momentum=0.9, box=1.0, weight_decay=0.1),
}
DATA = [[1.0, 2.0], [5.0, -3.0], [0.5, 4.0]]


@pytest.mark.parametrize("poison", [1e9, float("inf"), float("nan")])
@pytest.mark.parametrize("name", sorted(SPECS))
def test_padding_is_inert(name: str, poison: float) -> None:
    """Masked samples inside steps, and whole masked steps between and after the others, change neither the result nor
    the mean loss; the optimizer's state (momentum, step count) does not move in an empty step, even if the objective
    is not finite there. (Inside a step the mask is the objective's: a finite value that is masked has gradient 0.)
    """
    optimizer = SPECS[name].at(ROUND)
    plain, loss = descend(objective, w(0.3), batches(DATA), optimizer)
    big, empty, yes, no = 1e9, [poison] * 3, [True, True, False], [False] * 3
    padded = batches([[*DATA[0], big], empty, [*DATA[1], big], [*DATA[2], big], empty], [yes, no, yes, yes, no])
    got, padded_loss = descend(objective, w(0.3), padded, optimizer)
    assert float(got["w"]) == pytest.approx(float(plain["w"]), abs=1e-12)
    assert float(padded_loss) == pytest.approx(float(loss), abs=1e-12)


def test_the_prox_does_not_act_in_an_empty_step() -> None:
    """w = 5 shrinks by 1 in each real step and stays in the padded ones: the constant objective has gradient 0."""

    def shrink(params: Params) -> Params:
        return tree.map(lambda leaf: prox.l1(leaf, 1.0), params)

    data = batches([[0.0]] * 4, [[True], [False], [True], [False]])
    got, _ = descend(lambda params, batch: 0 * params["w"], w(5.0), data, Sgd(lr=1.0).at(ROUND), shrink)
    assert float(got["w"]) == 3


@pytest.mark.parametrize("name", sorted(SPECS))
def test_vmap_equals_one_by_one(name: str) -> None:
    """Stacked clients, with different starts and masks, one without any data, end where each ends alone."""
    rng = torch.Generator().manual_seed(0)
    pool_x = torch.randn(20, 3, generator=rng, dtype=F64)
    pool_y = torch.randn(20, generator=rng, dtype=F64)
    rows = torch.randint(20, (4, 5, 6), generator=rng)
    real = torch.rand(4, 5, 6, generator=rng) < 0.6
    real[1, 2:], real[3] = False, False
    starts = {
        "w": torch.randn(4, 3, generator=rng, dtype=F64),
        "b": torch.randn(4, generator=rng, dtype=F64),
    }

    def fit(params: Params, batch: Batch) -> Tensor:
        errors = torch.tanh(batch.x @ params["w"] + params["b"]) - batch.y
        return torch.where(batch.real, errors.square(), 0.0).sum() / batch.real.sum().clamp(min=1)

    def train(start: Params, rows: Tensor, real: Tensor) -> tuple[Any, Tensor]:
        data = Batches(pool_x, pool_y, rows, real, torch.zeros(5, dtype=torch.int64))
        return descend(fit, start, data, SPECS[name].at(ROUND), lambda p: tree.map(lambda v: prox.l1(v, 0.01), p))

    stacked = vmap(train)(starts, rows, real)
    alone = tree.stack([train(tree.take(starts, c), rows[c], real[c]) for c in range(4)])
    for x, y in zip(tree.leaves(stacked), tree.leaves(alone), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    assert torch.equal(stacked[0]["w"][3], starts["w"][3])


def test_descend_is_pure_and_keeps_the_dtype() -> None:
    """The start is as before; a float32 scalar parameter is still float32 after training."""
    start = {"w": torch.tensor(0.25)}
    data = batches(DATA)._replace(pool_x=batches(DATA).pool_x.float())
    got, loss = descend(objective, start, data, Adaptive(lr=0.1).at(ROUND))
    assert float(start["w"]) == 0.25
    assert got["w"].dtype == loss.dtype == torch.float32


def test_nothing_to_train() -> None:
    """An objective without parameters is evaluated, not moved: the loss is its mean."""
    got, loss = descend(lambda params, batch: batch.x.mean(), {}, batches([[1.0], [3.0]]), Sgd(lr=0.1).at(ROUND))
    assert got == {}
    assert float(loss) == 2


def test_an_objective_that_is_nan_in_an_empty_step_is_not_seen() -> None:
    """Value and gradient of a padded step are dropped, not multiplied by 0: as in the plain test, w = 2 after x = 8."""

    def unmasked(params: Params, batch: Batch) -> Tensor:
        return 0.5 * (params["w"] - batch.x).square().mean()

    data = batches([[8.0], [float("nan")]], [[True], [False]])
    got, loss = descend(unmasked, w(0.0), data, Sgd(lr=0.25).at(ROUND))
    assert (float(got["w"]), float(loss)) == (2.0, 32.0)


def difference(params: Params, step: Together) -> Tensor:
    """½(w − (x − x′))², x and x′ the means of two minibatches."""
    one, two = step.parts
    return 0.5 * (params["w"] - (one.x.mean() - two.x.mean())).square()


def test_a_step_with_two_minibatches_by_hand() -> None:
    """w ← w − ¼(w − (x − x′)), w₀ = 0: x − x′ = 8 gives 2; a pair with an empty half is no step; 4 gives 2.5."""
    one, two = batches([[10.0], [1.0], [7.0]]), batches([[2.0], [1e9], [3.0]], [[True], [False], [True]])
    got, loss = descend(difference, w(0.0), Zipped((one, two)), Sgd(lr=0.25).at(ROUND))
    assert float(got["w"]) == pytest.approx(2.5, abs=1e-14)
    assert float(loss) == pytest.approx((32 + 2) / 2, abs=1e-12)


def test_zipped_minibatches_stack() -> None:
    """Two clients, the second without its last step, end where each ends alone."""
    pool = torch.arange(12.0, dtype=F64)
    rows = torch.tensor([[[0], [5]], [[7], [2]]])
    others = torch.tensor([[[3], [11]], [[1], [9]]])
    real = torch.tensor([[[True], [True]], [[True], [False]]])
    key = torch.zeros(2, dtype=torch.int64)

    def train(rows: Tensor, others: Tensor, real: Tensor) -> tuple[Params, Tensor]:
        both = Zipped(tuple(Batches(pool, pool, own, real, key) for own in (rows, others)))
        return descend(difference, w(0.5), both, Sgd(lr=0.1, momentum=0.9).at(ROUND))

    stacked = vmap(train)(rows, others, real)
    alone = tree.stack([train(rows[c], others[c], real[c]) for c in range(2)])
    for x, y in zip(tree.leaves(stacked), tree.leaves(alone), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-14)


def test_one_minibatch_again_and_again() -> None:
    """As the batch written out: momentum goes on from step to step; no steps, and an empty batch, do nothing."""
    optimizer = Sgd(lr=0.5, momentum=0.5).at(ROUND)
    (batch,) = batches([[4.0]]).each()
    for times in (0, 1, 4):
        got, loss = descend(objective, w(0.0), Repeated(batch, times), optimizer)
        expected, mean = descend(objective, w(0.0), batches([[4.0]] * times), optimizer)
        assert (float(got["w"]), float(loss)) == (float(expected["w"]), float(mean))
    empty = batch._replace(real=torch.tensor([False]))
    got, loss = descend(objective, w(3.0), Repeated(empty, 4), optimizer)
    assert (float(got["w"]), float(loss)) == (3.0, 0.0)


def test_a_term_by_hand() -> None:
    """w ← w − ½((w − 4) + (w − 1) − 3) = 4 from 0, whatever w was; the loss is that of the objective alone, ½·4²."""
    term = Quadratic(slope=w(-3.0), anchor=w(1.0), strength=1.0)
    for steps, mean in ((1, 8.0), (2, 4.0)):
        got, loss = descend(objective, w(0.0), batches([[4.0]] * steps), Sgd(lr=0.5).at(ROUND), term=term)
        assert float(got["w"]) == 4.0
        assert float(loss) == mean


@pytest.mark.parametrize("sloped", [True, False])
@pytest.mark.parametrize(
    "optimizer", [Sgd(lr=0.1), Sgd(lr=0.1, momentum=0.9), Sgd(lr=0.1, weight_decay=0.1), Accelerated(lr=0.1)]
)
def test_a_term_is_as_good_as_part_of_the_objective(optimizer: LocalOptimizer, sloped: bool) -> None:
    """For stacked clients, of whom one has fewer steps than the other, and for one."""
    values = torch.tensor([[3.0, -1.0, 2.0], [5.0, 7.0, 0.0]], dtype=F64)
    real = torch.tensor([[True, True, True], [True, True, False]])
    anchors, slopes = torch.tensor([1.0, -2.0], dtype=F64), torch.tensor([0.3, -0.4], dtype=F64)

    def trained(x: Tensor, mask: Tensor, anchor: Tensor, slope: Tensor, told: bool) -> Tensor:
        stream = Batches(x, x, torch.arange(3)[:, None], mask[:, None], torch.zeros(3, dtype=torch.int64))
        term = Quadratic({"w": slope} if sloped else None, {"w": anchor}, 0.8)

        def whole(params: Params, batch: Batch) -> Tensor:
            linear = params["w"] * slope if sloped else 0.0
            return objective(params, batch) + linear + pull(params, {"w": anchor}, 0.8)

        at = optimizer.at(ROUND)
        return (descend(objective, w(0.5), stream, at, term=term) if told else descend(whole, w(0.5), stream, at))[0][
            "w"
        ]

    told, derived = (
        vmap(lambda x, mask, anchor, slope, told=told: trained(x, mask, anchor, slope, told))(
            values, real, anchors, slopes
        )
        for told in (True, False)
    )
    torch.testing.assert_close(told, derived, rtol=0, atol=1e-14)
    for client in range(2):
        alone = trained(values[client], real[client], anchors[client], slopes[client], True)
        torch.testing.assert_close(alone, told[client], rtol=0, atol=1e-14)
