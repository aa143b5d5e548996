"""Protected samples: clipped one by one, noise once a step, and nothing else that looks at data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad

from personafl.algorithms import METHODS, Training
from personafl.core import samples, tree, wire
from personafl.core.algorithm import Problem, for_returning, only_by_gradients
from personafl.core.batches import Batch, Batches, Data, Repeated, Steps, Zipped
from personafl.core.descend import Quadratic, descend
from personafl.core.guard import Guard
from personafl.core.losses import MeanLoss, cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.core.samples import clipped_sums, gaussians, guarded, noisy_mean
from personafl.core.split import Split
from personafl.core.tree import Params
from personafl.simulate.engine import Engine, gather
from personafl.simulate.protection import ALWAYS, Protection
from personafl.simulate.trainer import bound
from personafl.testing import Case, make_case
from tiers import tiered

NET = Net(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))).to(torch.device("cpu"), torch.float64)
LOSS = MeanLoss(NET, cross_entropy)
CLIENTS = np.array([0, 3, 4])  # of 3, 14 and 1 samples


def some_batch(size: int = 5, seed: int = 0, scale: float = 1.0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(size, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(2, (size,), generator=generator)
    return Batch(x, y, torch.ones(size, dtype=torch.bool), torch.tensor(seed))


def start(seed: int = 0) -> Params:
    return {name: value.double() for name, value in NET.init(torch.Generator().manual_seed(seed)).items()}


def guard(clip: float = 0.5, noise: float = 0.0, size: float = 5.0, key: int = 3) -> Guard:
    numbers = (torch.tensor(value, dtype=torch.float64) for value in (clip, noise, size))
    return Guard(*numbers, torch.tensor(key), torch.tensor(data=True))


def norm(values: Params) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in values.values()))


def one_by_one(params: Params, batch: Batch, clip: float) -> Params:
    """Σ_j g_j · min(1, C/‖g_j‖), in a loop: each g_j by itself, its norm over all weights and biases together."""
    total = tree.zeros_like(params)
    for x, y in zip(batch.x[batch.real], batch.y[batch.real], strict=True):

        def loss(own: Params, x: Tensor = x, y: Tensor = y) -> Tensor:
            return cross_entropy(NET.apply(own, x[None]), y[None]).sum()

        own: Params = grad(loss)(params)
        total = tree.add(total, tree.scale(own, min(1.0, clip / norm(own))))
    return total


def test_a_step_by_hand() -> None:
    """(Σ clipped + z C ξ)/b: some samples are clipped at 0.5 and some are not; b is 7 though 5 came."""
    params, batch = start(), some_batch(scale=2.0)
    norms = [norm(one_by_one(params, some, math.inf)) for some in each_alone(batch)]
    assert min(norms) < 0.7 < max(norms)
    gradient, value = guarded(LOSS, params, batch, guard(0.7, noise=0.8, size=7.0))
    names = sorted(params)
    noise = gaussians(torch.tensor(3), sum(params[name].numel() for name in names), torch.float64)
    parts = dict(zip(names, noise.split([params[name].numel() for name in names]), strict=True))
    for name, total in one_by_one(params, batch, 0.7).items():
        expected = (total + 0.8 * 0.7 * parts[name].reshape(total.shape)) / 7
        torch.testing.assert_close(gradient[name], expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(value, LOSS(params, batch))


def each_alone(batch: Batch) -> list[Batch]:
    return [
        Batch(batch.x[at : at + 1], batch.y[at : at + 1], batch.real[at : at + 1], batch.key)
        for at in range(len(batch.real))
    ]


def test_one_sample_more_moves_a_sum_by_the_clip_at_most() -> None:
    """Over a hundred minibatches, whatever the sample: small, huge, or not a number; and by nearly as much for some."""
    clip, moved = torch.tensor(0.3, dtype=torch.float64), []
    for seed in range(100):
        batch, params = some_batch(6, seed, scale=10.0 ** (seed % 7 - 3)), start(seed)
        batch = batch._replace(x=batch.x.index_fill(0, torch.tensor([5]), math.nan)) if seed % 10 == 9 else batch
        fewer = batch._replace(real=torch.tensor([True] * 5 + [False]))
        sums, other = (clipped_sums(LOSS, params, some, clip, None)[0] for some in (batch, fewer))
        moved.append(norm(tree.sub(sums, other)))
    assert max(moved) <= 0.3 * (1 + 1e-12)
    assert max(moved) > 0.29
    assert moved[9] == 0  # a sample without a gradient counts as none


def test_with_a_large_clip_and_no_noise_it_is_the_plain_gradient() -> None:
    params, batch = start(), some_batch()
    gradient, _ = guarded(LOSS, params, batch, guard(clip=1e30))
    torch.testing.assert_close(gradient, grad(LOSS)(params, batch), rtol=0, atol=1e-15)


def test_padding_is_inert() -> None:
    """Of infinite inputs too."""
    params, batch = start(), some_batch()
    x = torch.cat([batch.x, torch.full((2, 3), math.inf, dtype=torch.float64)])
    padded = Batch(x, torch.cat([batch.y, batch.y[:2]]), torch.tensor([True] * 5 + [False] * 2), batch.key)
    one, other = (guarded(LOSS, params, some, guard(noise=0.4)) for some in (batch, padded))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-15)


def test_what_looks_at_no_data_is_outside_the_clip() -> None:
    """An anchor within the objective does what the same one does as a term: its gradient is 50 times the clip."""
    params, batch, far = start(), some_batch(), tree.scale(start(1), 50.0)

    def objective(own: Params, some: Batch) -> Tensor:
        offset = tree.sub(own, far)
        return LOSS(own, some) + 0.5 * 0.7 * tree.dot(offset, offset)

    inside, _ = guarded(objective, params, batch, guard(noise=0.1))
    outside, _ = guarded(LOSS, params, batch, guard(noise=0.1))
    outside = Quadratic(anchor=far, strength=0.7).onto(outside, params)
    torch.testing.assert_close(inside, outside, rtol=0, atol=1e-12)
    assert norm(outside) > 20


def test_noise_is_gaussian_of_its_key() -> None:
    drawn = gaussians(torch.tensor(5), 200_000, torch.float64)
    assert abs(float(drawn.mean())) < 0.01
    assert abs(float(drawn.std()) - 1) < 0.01
    assert abs(float((drawn.abs() > 1.959964).double().mean()) - 0.05) < 0.003
    assert torch.equal(drawn[:10], gaussians(torch.tensor(5), 200_000, torch.float64)[:10])
    assert not torch.equal(drawn[:10], gaussians(torch.tensor(6), 10, torch.float64))
    keys = torch.tensor([5, 6])
    stacked = torch.func.vmap(lambda key: gaussians(key, 7, torch.float64))(keys)
    torch.testing.assert_close(stacked, torch.stack([gaussians(key, 7, torch.float64) for key in keys]))


def test_a_step_without_samples_is_a_step_of_noise_and_one_not_taken_is_none() -> None:
    batch, params = some_batch(2), start()
    one = guard(noise=0.5, size=2.0)
    steps = one._replace(size=torch.ones(2).double(), key=torch.tensor([1, 2]), taken=torch.tensor([True, False]))
    rows = torch.zeros(2, 2, dtype=torch.int64)
    batches = Batches(batch.x, batch.y, rows, torch.zeros(2, 2, dtype=torch.bool), torch.zeros(2).long(), guard=steps)
    after, _ = descend(LOSS, params, batches, Sgd(lr=0.1).at(torch.tensor(0.0)))
    noise = gaussians(torch.tensor(1), sum(value.numel() for value in params.values()), torch.float64)
    assert norm(tree.sub(after, params)) == pytest.approx(0.1 * 0.5 * 0.5 * float(noise.norm()), rel=1e-12)


def test_steps_that_use_a_minibatch_otherwise_are_refused() -> None:
    batch = some_batch()._replace(guard=guard())
    with pytest.raises(ValueError, match="for one step"):
        Repeated(batch, 2)
    batches = Batches(batch.x, batch.y, torch.zeros(1, 2).long(), torch.ones(1, 2).bool(), torch.zeros(1).long())
    with pytest.raises(ValueError, match="several minibatches"):
        Zipped((batches, batches._replace(guard=guard())))


def built(method: str) -> Case:
    training = Training(work=Steps(epochs=2, batch=4), optimizer=Sgd(lr=0.1))
    net = Net(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 10)))
    problem = Problem(net.to(torch.device("cpu"), torch.float64), cross_entropy, split=Split(("4.*",)))
    return make_case(METHODS[method].build(training, **OPTIONS.get(method, {})), problem)


def updated(case: Case, data: Data, strategy: Any = "stacked") -> Any:
    """Return states and uploads of three clients, without the loss, which is not protected."""
    down, state, _ = case.one_client(0)
    states = tree.map(lambda leaf: leaf.unsqueeze(0).repeat(3, *[1] * leaf.ndim), state)
    update = bound(case.algorithm.client.update, case.problem)
    states, upload = Engine(strategy, 8).train(update, for_returning(down), states, data)
    return states, wire.dense_each(upload._replace(loss=torch.zeros(3)))


def drawn(case: Case, clip: float, noise: float, sampling: Any = "poisson") -> Data:
    protection = Protection(clip, np.full(5, noise), np.full(5, ALWAYS), sampling)
    return gather(case.data, CLIENTS, case.algorithm.client.phases, 1, 0, protection)


BY_GRADIENTS = [name for name in METHODS if only_by_gradients(METHODS[name].build(Training()).client)]
OPTIONS: dict[str, Any] = {"qupel": {"bits": 2}}  # without, it has one gradient of each minibatch too
OTHERWISE = {
    *("pfedme", "perfedavg", "quped", "qupel", "fml", "fedrod"),
    *("fedproto", "fedpac", "feddbe", "fedcp", "gpfl", "ifca", "fedem", "fedfomo"),
}


def test_which_methods_can_be_protected() -> None:
    assert set(BY_GRADIENTS) == METHODS.keys() - OTHERWISE


@pytest.mark.parametrize("method", BY_GRADIENTS)
def test_stacked_is_one_by_one(method: str) -> None:
    case = built(method)
    data = drawn(case, 0.5, 0.7)
    one, other = (updated(case, data, strategy) for strategy in ("stacked", "sequential"))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", BY_GRADIENTS)
def test_with_a_large_clip_and_no_noise_it_is_plain_training(method: str) -> None:
    """Of shuffled epochs, the short last minibatch of which is divided by what it has."""
    case = built(method)
    plain = gather(case.data, CLIENTS, case.algorithm.client.phases, 1, 0)
    torch.testing.assert_close(
        updated(case, drawn(case, 1e30, 0.0, "epochs")), updated(case, plain), rtol=0, atol=1e-10
    )


def with_other_samples(data: Data) -> Data:
    def other(batches: Batches) -> Batches:
        generator = torch.Generator().manual_seed(1)
        x = torch.rand(batches.pool_x.shape, generator=generator, dtype=torch.float64)
        return batches._replace(pool_x=x, pool_y=(3 * batches.pool_y + 1) % 10)

    return data._replace(phases={name: other(batches) for name, batches in data.phases.items()})


def of_one(data: Data, row: int) -> Data:
    def own(b: Batches) -> Batches:
        return Batches(b.pool_x, b.pool_y, b.rows[row], b.real[row], b.key[row], guard=tree.take(b.guard, row))

    return Data({name: own(b) for name, b in data.phases.items()}, data.examples[row], data.round)


def without(data: Data, sample: int) -> Data:
    """Return one client's without a sample, wherever it comes up."""
    phases = {
        name: batches._replace(real=batches.real & (batches.rows != sample)) for name, batches in data.phases.items()
    }
    return data._replace(phases=phases)


def looks_elsewhere(method: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Say whether data reach what a client keeps or sends though all clipped gradients are next to nothing; whether the
    noise of a step is used twice; or whether a sample moves the first sum by more than
    the clip, or at all if it is not in it.
    """
    case, keys, sums = built(method), [], []

    def noisy(given: Params, by: Guard) -> Params:
        keys.append(int(by.key))
        return noisy_mean(given, by)

    def clipped(*given: Any) -> Any:
        sums.append(clipped_sums(*given))
        return sums[-1]

    monkeypatch.setattr(samples, "noisy_mean", noisy)
    monkeypatch.setattr(samples, "clipped_sums", clipped)
    try:
        data = drawn(case, 1e-30, 1e20)
        one, other = (updated(case, some, "sequential") for some in (data, with_other_samples(data)))
        again, whole = len(keys) != 2 * len(set(keys)), of_one(data, 1)
        first, (down, state, _) = next(iter(whole.phases.values())), case.one_client(0)
        rows = [-1, *first.rows.unique().tolist()]
        starts = []
        for row in rows:
            count = len(sums)
            case.update(down, state, without(whole, row))
            starts.append(sums[count][0])
    except ValueError:  # it asked for steps that cannot be protected
        return True
    differ = any(float((a - b).abs().max()) > 1e-12 for a, b in zip(tree.leaves(one), tree.leaves(other), strict=True))
    in_it = set(first.rows[0][first.real[0]].tolist())
    moved = {row: 1e30 * norm(tree.sub(starts[0], each)) for row, each in zip(rows, starts, strict=True)}
    return differ or again or any(by > (row in in_it) + 1e-9 for row, by in moved.items())


@pytest.mark.parametrize("method", tiered(METHODS, {"fedavg", "fedalt", "fedbcd", "scaffold"}))
def test_a_method_that_reads_data_elsewhere_is_refused(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other is, but one whose objective is no mean over samples: gradients of single ones are another's."""
    joint = method in ("feddbe", "fedcp")  # a term of a batch's mean, or of its pairs
    unsent = method == "fedfomo"  # it tries others' models on its samples, and nobody sends it any here
    assert looks_elsewhere(method, monkeypatch) == (method not in BY_GRADIENTS and not joint and not unsent)


def test_a_method_must_say_it_of_its_own_update() -> None:
    """A subclass that trains otherwise does not inherit the promise."""
    client: Any = METHODS["ditto"].build(Training()).client

    class Other(type(client)):  # type: ignore[misc]
        def update(self, *given: Any) -> Any:
            return super().update(*given)

    assert only_by_gradients(client)
    assert not only_by_gradients(Other())
