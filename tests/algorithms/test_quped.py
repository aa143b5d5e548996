"""QuPeD against Algorithm 2, worked in numpy; its limits and its packed models; float64."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from least_squares import LeastSquares
from personafl.algorithms import METHODS, Training, quantize
from personafl.algorithms.averaging import Model
from personafl.algorithms.quped import Centered, QupedClient, quped
from personafl.core import rng, tree, wire
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.batches import Steps
from personafl.core.losses import cross_entropy, divergence
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.core.schedule import Step
from personafl.errors import BadInput
from personafl.testing import check_algorithm, make_case
from quped_by_hand import (
    DEEP,
    ETA,
    F64,
    HALVED,
    NAMES,
    PENALTY,
    PROBLEM,
    ROUND,
    by_hand,
    client,
    data_of,
    drawn,
    tensors,
)


def check_one_step(rule: QupedClient, number: int = ROUND, **expected: Any) -> None:
    """Compare one step of a rule, in a round of this number, with the one by hand."""
    inputs, targets, x, w = drawn()
    c = np.array([-0.6, 0.5])
    expected_x, expected_c, expected_w = by_hand(inputs, targets, x, c, w, **expected)
    state = Centered(tensors(x), {"1.weight": torch.from_numpy(c)})
    after, upload = rule.update(PROBLEM, Model(tensors(w)), state, data_of(inputs, targets, number=number))
    np.testing.assert_allclose(after.centers["1.weight"].numpy(), expected_c, atol=1e-12)
    for name in NAMES:
        np.testing.assert_allclose(after.model[name].numpy(), expected_x[name], atol=1e-12)
        np.testing.assert_allclose((upload.change[name]).numpy(), expected_w[name] - w[name], atol=1e-12)


@pytest.mark.parametrize("scale", ["mean", "sqrt", "sum"])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_one_iteration_by_hand(scale: str, clip: float | None) -> None:
    """x, c and w_i in this order, each at the others' newest values; the new w_i is what is sent (E2)."""
    check_one_step(client(center_scale=scale, center_clip=clip), scale=scale, clip=clip or np.inf)


def test_centers_step_at_the_rate_of_training_unless_told_otherwise() -> None:
    """η₂ = η₁ for means, and for the paper's plain sums the paper's 1e-4."""
    rates = [client(center_lr=None, center_scale=scale).centers.lr for scale in ("mean", "sqrt", "sum")]
    assert rates == [ETA, ETA, 1e-4]


def test_a_center_goes_where_the_mean_of_its_members_would() -> None:
    """Without a prox, η₂ = η₁: the mean of x's own SGD steps at Q(x), in a layer of any size."""
    width = 40
    make = lambda: nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 3))  # noqa: E731
    net = Net(make).to(torch.device("cpu"), F64)
    inputs, targets, _, _ = drawn()
    problem, data = Problem(net, cross_entropy), data_of(inputs, targets)
    down = Model(tree.map(lambda p: p.double(), net.init(rng.generator(5))))
    rule = dataclasses.replace(client(bits=2, center_lr=None), distillation=0.0, penalty=0.0)
    state = rule.init(problem, down, rng.generator(0))
    after, _ = rule.update(problem, down, state, data)
    centers = state.centers["2.weight"]
    at = {**after.model, "2.weight": quantize.hard(after.model["2.weight"], centers)}

    def loss(weight: Tensor) -> Tensor:
        return cross_entropy(
            net.apply({**at, "2.weight": weight}, data.phases["local"].pool_x), data.phases["local"].pool_y
        ).mean()

    stepped = at["2.weight"] - ETA * torch.func.grad(loss)(at["2.weight"])
    codes = quantize.nearest(after.model["2.weight"], centers)
    expected = torch.stack([stepped[codes == code].mean() for code in range(4)])
    torch.testing.assert_close(after.centers["2.weight"], expected.sort().values, rtol=0, atol=1e-14)


def test_weight_decay_and_schedule_by_hand() -> None:
    """Decay acts on x alone, the schedule on η₁ and η₃; η₂ is constant, and w decays only if told to."""
    check_one_step(client(HALVED), factor=0.5**ROUND, decay=0.2)
    check_one_step(client(HALVED, shared_decay=0.3), factor=0.5**ROUND, decay=0.2, shared_decay=0.3)
    scheduled = client(HALVED, center_schedule=Step(every=2, factor=0.1))  # in round 3: once
    inputs, targets, x, w = drawn()
    c = np.array([-0.6, 0.5])
    state = Centered(tensors(x), {"1.weight": torch.from_numpy(c)})
    free, slow = (
        rule.update(PROBLEM, Model(tensors(w)), state, data_of(inputs, targets))[0].centers["1.weight"].numpy() - c
        for rule in (client(HALVED), scheduled)
    )
    np.testing.assert_allclose(slow, 0.1 * free, atol=1e-15)


@pytest.mark.parametrize(
    ("work", "unit", "time"),
    [
        (Steps(steps=10, batch=25), "rounds", 7),
        (Steps(steps=10, batch=25), 40, 1),  # 70 of 40 steps: in the second epoch, which is number 1
        (Steps(steps=10, batch=25), 14, 5),
        (Steps(steps=3, batch=None), 1, 21),
        (Steps(epochs=2), "epochs", 14),
    ],
)
def test_the_unit_of_the_penalty(work: Steps, unit: str | int, time: int) -> None:
    """λ(t) in round 7: t counts rounds, epochs, or epochs of so many steps that are complete."""
    rule = client(Training(work=work, optimizer=Sgd(lr=ETA)), penalty_unit=unit, growth=0.9)
    check_one_step(rule, 7, penalty=PENALTY * time / 0.9**time)


@pytest.mark.parametrize(
    ("work", "unit", "words"),
    [
        (
            Steps(steps=10),
            "epochs",
            "an epoch's number of steps instead, such as 40 for",
        ),
        (Steps(steps=10, least=2), "epochs", "training.least_steps"),
        (Steps(steps=10, least=2), 40, "training.least_steps"),
        (Steps(epochs=3, least=2), "epochs", "least_epochs"),
        (Steps(epochs=1), 40, 'set it to "epochs"'),
    ],
)
def test_a_unit_that_training_does_not_count_is_refused(work: Steps, unit: str | int, words: str) -> None:
    """The line names the key and what to do."""
    for method in ("quped", "qupel"):
        with pytest.raises(BadInput, match=r"^method\.penalty_unit: ") as error:
            METHODS[method].build(Training(work=work), penalty_unit=unit)
        assert words in str(error.value)


def test_the_shared_model_learns_by_distillation_alone() -> None:
    """Where the pupils agree with w there is nothing to learn, whatever the labels say; λ_p = 0 never moves it."""
    inputs, targets, _, w = drawn()
    data = data_of(inputs, targets)
    same = Centered(tensors(w), {})
    still = dataclasses.replace(client(bits=None), training=Training(work=Steps(steps=1), optimizer=Sgd(lr=1e-300)))
    _, upload = still.update(PROBLEM, Model(tensors(w)), same, data)
    assert max(float(value.abs().max()) for value in upload.change.values()) < 1e-15
    alone = dataclasses.replace(client(), distillation=0.0)
    _, upload = alone.update(PROBLEM, Model(tensors(w)), alone.init(PROBLEM, Model(tensors(w)), rng.generator(0)), data)
    assert not any(value.any() for value in upload.change.values())


def test_proxquant_has_fixed_centers() -> None:
    """center_start = "unit", center_lr = 0: centers are ±1 and stay there; a large λ puts all weights on them."""
    inputs, targets, x, w = drawn()
    rule = dataclasses.replace(client(center_start="unit", center_lr=0.0), penalty=1e3)
    start = rule.init(PROBLEM, Model(tensors(x)), rng.generator(0))
    after, _ = rule.update(PROBLEM, Model(tensors(w)), start, data_of(inputs, targets))
    assert after.centers["1.weight"].tolist() == [-1.0, 1.0]
    assert set(after.model["1.weight"].flatten().tolist()) <= {-1.0, 1.0}


def test_divergence_is_kl_and_its_gradients() -> None:
    """Against torch's kl_div, per sample; scores of sequences are averaged over positions."""
    generator = torch.Generator().manual_seed(1)
    teacher, pupil = (torch.randn((5, 4, 3), generator=generator, dtype=F64) for _ in range(2))
    expected = nn.functional.kl_div(pupil.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1)
    torch.testing.assert_close(divergence(teacher, pupil), expected.mean(1))
    torch.testing.assert_close(divergence(teacher[:, 0], pupil[:, 0]), expected[:, 0])


def test_full_precision_without_distillation_is_training_alone(problem: LeastSquares) -> None:
    """x is Local's from the same start, to the bit, on f_i."""
    training = Training(work=Steps(steps=3, batch=None), optimizer=Sgd(lr=0.05, momentum=0.5))
    simulation = problem.simulate(quped(training, distillation=0.0), 2)
    for i in range(3):
        w = torch.tensor(problem.start)
        for _ in range(2):
            b = torch.zeros_like(w)
            for _ in range(3):
                b = 0.5 * b + torch.from_numpy(problem.gradient(i, w.numpy()))
                w = w - 0.05 * b
        np.testing.assert_allclose(simulation.store.get(i)["model/weight"][0].numpy(), w.numpy(), atol=1e-12)


def test_many_levels_tend_to_full_precision() -> None:
    """m → ∞: the personal model is x itself, to the distance of the centers."""
    inputs, targets, x, w = drawn()
    gaps = []
    for bits in (2, 4, 8):
        rule = client(bits=bits)
        state = rule.init(PROBLEM, Model(tensors(x)), rng.generator(0))
        after, _ = rule.update(PROBLEM, Model(tensors(w)), state, data_of(inputs, targets, number=0))
        own = rule.models(PROBLEM, Model(tensors(w)), after)["personal"]["1.weight"]
        gaps.append(float((own - after.model["1.weight"]).abs().max()))
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 0.02


def test_frozen_weights_stay_with_their_centers() -> None:
    """From round freeze_after on: codes stay as they are, weights are at centers, centers and other layers move."""
    inputs, targets, x, w = drawn()
    rule = client(bits=2, freeze_after=ROUND)
    state = rule.init(PROBLEM, Model(tensors(x)), rng.generator(0))
    codes = quantize.nearest(state.model["1.weight"], state.centers["1.weight"])
    after, _ = rule.update(PROBLEM, Model(tensors(w)), state, data_of(inputs, targets, steps=5))
    assert torch.equal(after.model["1.weight"], after.centers["1.weight"][codes])
    assert not torch.equal(after.centers["1.weight"], state.centers["1.weight"])
    assert not torch.equal(after.model["0.weight"], state.model["0.weight"])
    free, _ = rule.update(PROBLEM, Model(tensors(w)), state, data_of(inputs, targets, steps=5, number=ROUND - 1))
    assert not torch.equal(free.model["1.weight"], quantize.hard(free.model["1.weight"], free.centers["1.weight"]))


def test_a_sharp_soft_quantizer_is_nearly_the_hard_one() -> None:
    """Centers step alike; the soft one also moves x through Q̃."""
    inputs, targets, x, w = drawn()
    c = torch.tensor([-0.6, 0.5], dtype=F64)
    steps = {}
    for sharpness in (None, 1e8, 2.0):
        state = Centered(tensors(x), {"1.weight": c})
        steps[sharpness] = client(sharpness=sharpness).update(
            PROBLEM, Model(tensors(w)), state, data_of(inputs, targets, number=0)
        )[0]
    torch.testing.assert_close(steps[1e8].centers["1.weight"], steps[None].centers["1.weight"], rtol=0, atol=1e-6)
    assert float((steps[2.0].model["1.weight"] - steps[None].model["1.weight"]).abs().max()) > 1e-3


def objective(rule: QupedClient, x: dict[str, Tensor], c: Tensor, inputs: Tensor, labels: Tensor) -> float:
    """F_λ(x, c) of Algorithm 1 (λ_p = 0)."""
    soft = {**x, "1.weight": quantize.soft(x["1.weight"], c, float(rule.sharpness or 0))}
    losses = [cross_entropy(DEEP.apply(model, inputs), labels).mean() for model in (x, soft)]
    distance = (x["1.weight"] - quantize.hard(x["1.weight"], c)).abs().sum() / 2
    return float(sum(losses) + rule.penalty * ROUND * distance)


@pytest.mark.parametrize(("scale", "rate"), [("sum", 0.005), ("mean", 0.04)])
def test_the_objective_never_rises(scale: str, rate: float) -> None:
    """Theorem 1: full gradients, small steps, a smooth quantizer: F_λ decreases in every iteration of Algorithm 1.

    A center has 1 to 8 of 9 weights, so that the mean of as small a step for all of them may have a larger rate.
    """
    inputs, targets, x, w = drawn()
    rule = dataclasses.replace(
        client(sharpness=3.0, center_scale=scale),
        distillation=0.0,
        centers=Sgd(lr=rate),
        training=Training(work=Steps(steps=1, batch=None), optimizer=Sgd(lr=0.01)),
    )
    state = Centered(tensors(x), {"1.weight": torch.tensor([-0.6, 0.5], dtype=F64)})
    values = []
    for _ in range(60):
        model, centers = state
        pool, labels = torch.from_numpy(inputs), torch.from_numpy(targets.argmax(1))
        values.append(objective(rule, model, centers["1.weight"], pool, labels))
        state, _ = rule.update(PROBLEM, Model(tensors(w)), state, data_of(inputs, targets))
    assert all(after <= before + 1e-9 for before, after in itertools.pairwise(values))
    assert values[0] - values[-1] > 0.1


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_packed_models_are_the_models(bits: int) -> None:
    """Codes take so many bits a weight; restored, they are Q_c(x) to the bit."""
    inputs, targets, x, w = drawn()
    rule, down = client(bits=bits), Model(tensors(w))
    state, _ = rule.update(
        PROBLEM, down, rule.init(PROBLEM, Model(tensors(x)), rng.generator(0)), data_of(inputs, targets)
    )
    [part] = rule.packed(PROBLEM, down, state)["personal"]
    form = part["1.weight"]
    assert isinstance(form, wire.Quantized)
    assert len(form.codes) == -(-9 * bits // 8)
    personal = rule.models(PROBLEM, down, state)["personal"]
    assert all(torch.equal(value, personal[name]) for name, value in wire.dense(part).items())


def wide() -> Problem:
    net = Net(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 7), nn.Linear(7, 10)))
    return Problem(net.to(torch.device("cpu"), F64), cross_entropy)


@pytest.mark.parametrize("options", [{"bits": 1, "sharpness": 5.0}, {"bits": 2, "freeze_after": 1}])
def test_laws_with_centers(options: dict[str, object]) -> None:
    training = Training(work=Steps(epochs=1, batch=4), optimizer=Sgd(lr=0.1, momentum=0.9, weight_decay=1e-3))
    check_algorithm(quped(training, center_lr=0.01, penalty=0.01, **options), wide())  # type: ignore[arg-type]


def other() -> Problem:
    """The client's own network is another one, with bits of its own."""
    make = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 6), nn.Linear(6, 10))  # noqa: E731
    own = Net(make).to(torch.device("cpu"), F64)
    return dataclasses.replace(wide(), local_net=own, bits=2)


def test_laws_with_an_architecture_of_ones_own(tmp_path: Path) -> None:
    """The shared model stays what it is; the personal one has the client's network and as many centers as its bits."""
    training = Training(work=Steps(epochs=1, batch=4), optimizer=Sgd(lr=0.1))
    algorithm: Algorithm = quped(training, center_lr=0.01, penalty=0.01)
    check_algorithm(algorithm, other())
    case = make_case(algorithm, other())
    _, state, _ = case.one_client()
    assert tree.map(len, state.centers) == {"3.weight": 4}
    assert "quped" in METHODS
