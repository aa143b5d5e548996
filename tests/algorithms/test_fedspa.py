"""FedSpa against Huang et al. 2022, worked in numpy: masks, their search, what is sent, and the limit without masks."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from least_squares import LeastSquares, shared
from personafl.algorithms import METHODS, Training
from personafl.algorithms.fedspa import active_entries
from personafl.core import wire
from personafl.core.algorithm import Problem
from personafl.core.batches import Steps
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Adaptive, Sgd
from personafl.runs.scoring import tune
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store
from personafl.testing import Case, check_algorithm, make_case

LR, STEPS = 0.05, 3
TRAINING = Training(work=Steps(steps=STEPS, batch=None), optimizer=Sgd(lr=LR))
ROUGH = Training(work=Steps(epochs=2, batch=4), optimizer=Sgd(lr=0.1, momentum=0.9, weight_decay=0.01))
CLIENTS = range(3)


def masks(simulation: Simulation) -> list[np.ndarray]:
    """The masks of all clients; of those that have not taken part, the ones that they would draw."""
    states = simulation.states(0, simulation.down(), np.array(CLIENTS))
    return [mask[0].numpy() for mask in states.mask["weight"]]


def case(training: Training = ROUGH, **options: object) -> Case:
    """A convolution (a dense bias beside it) and a linear layer on the digits."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 10)).double()
    return make_case(METHODS["fedspa"].build(training, **options), Problem(Net(module), cross_entropy))


@pytest.mark.parametrize("density", [0.25, 0.5, 0.75])
def test_three_rounds_by_hand(problem: LeastSquares, density: float) -> None:
    """Train w_t ⊙ m; prune the ⌈α_t k⌉ smallest active |w_i|; regrow as many where the dense |∇f(w_i)| is largest.

    T = 4 rounds of search from α_0 = 0.8: α_0, α_1, α_2 = 0.8, 0.4(1 + cos π/4), 0.4.
    """
    algorithm = METHODS["fedspa"].build(TRAINING, density=density, prune_rate=0.8, search_rounds=4)
    simulation = problem.simulate(algorithm, 0)
    w, mask, active = problem.start, [m > 0 for m in masks(simulation)], round(4 * density)
    start = mask
    for t in range(3):
        simulation.step(t)
        changes, searched = [], []
        for i in CLIENTS:
            assert mask[i].sum() == active
            local = w * mask[i]
            for _ in range(STEPS):
                local = local - LR * problem.gradient(i, local) * mask[i]
            changes.append(local - w * mask[i])
            count = math.ceil(0.4 * (1 + math.cos(math.pi * t / 4)) * active)
            gradient = np.abs(problem.gradient(i, local))
            kept = set(sorted(np.flatnonzero(mask[i]), key=lambda j: abs(local[j]))[count:])
            grown = sorted(set(range(4)) - kept, key=lambda j: -gradient[j])[:count]
            searched.append(np.isin(np.arange(4), [*kept, *grown]))
        w = w + sum(p * change for p, change in zip(problem.weights, changes, strict=True))
        mask = searched
        np.testing.assert_allclose(shared(simulation), w, atol=1e-12)
        for found, expected in zip(masks(simulation), mask, strict=True):
            assert np.array_equal(found, expected.astype(float))
    assert any(not np.array_equal(a, b) for a, b in zip(start, mask, strict=True))  # some mask moved


@pytest.mark.parametrize("prune_rate", [0.0, 0.5])
def test_density_1_is_fedavg(problem: LeastSquares, prune_rate: float) -> None:
    training = Training(work=Steps(epochs=2, batch=2), optimizer=Sgd(lr=LR, momentum=0.9, weight_decay=0.01, clip=1.0))
    server = Adaptive(lr=0.1)
    fedavg = problem.simulate(METHODS["fedavg"].build(training, server=server), 3)
    algorithm = METHODS["fedspa"].build(training, density=1.0, prune_rate=prune_rate, server=server)
    np.testing.assert_allclose(shared(problem.simulate(algorithm, 3)), shared(fedavg), rtol=0, atol=1e-12)


@pytest.mark.parametrize("density", [0.1, 0.5, 0.8])
def test_the_number_of_active_entries_of_a_layer_never_changes(density: float) -> None:
    """Over rounds in which masks do; weights of fewer than two dimensions have no mask."""
    tried = case(density=density, search_rounds=4)
    shapes = tuple((name, tuple(shape)) for name, shape in tried.problem.net.shapes.items() if len(shape) > 1)
    active = active_entries(shapes, density)
    with tried.simulation() as simulation:
        before = simulation.states(0, simulation.down(), np.arange(5))
        for number in range(4):
            simulation.step(number)
            states = simulation.states(0, simulation.down(), np.arange(5))
            assert states.mask.keys() == {"0.weight", "3.weight"}
            for name, mask in states.mask.items():
                assert set(mask.unique().tolist()) <= {0.0, 1.0}
                assert mask.flatten(1).sum(1).tolist() == [active[name]] * 5
        assert not torch.equal(before.mask["3.weight"], states.mask["3.weight"])


@pytest.mark.parametrize("optimizer", [ROUGH.optimizer, Adaptive(lr=0.01, weight_decay=0.01)])
def test_inactive_entries_are_exactly_0(optimizer: Sgd | Adaptive) -> None:
    """Whatever the optimizer keeps: of the change that is sent, and of the personal model, also after fine-tuning."""
    tried = case(Training(work=ROUGH.work, optimizer=optimizer), density=0.3)
    down, state, data = tried.one_client()
    rule = tried.algorithm.client
    after, upload = tried.update(down, state, data)
    change = wire.dense(upload).change
    moved = rule.models(tried.problem, down, after)["personal"]
    tuned = rule.personalize(tried.problem, down, state, data._replace(phases={"tune": data.phases["local"]}))
    for name, mask in state.mask.items():
        outside = mask == 0
        for params in (change, tuned.model):
            assert torch.equal(params[name][outside], torch.zeros_like(params[name][outside]))
            assert bool((params[name][~outside] != 0).any())
        assert torch.equal(moved[name] != 0, after.mask[name] != 0)


def test_what_is_sent_are_the_active_entries() -> None:
    """A bit for each weight and 8 bytes for an active one, in double precision, beside the dense biases."""
    tried = case(density=0.1)
    down, state, data = tried.one_client()
    _, upload = tried.update(down, state, data)
    assert active_entries((("0.weight", (4, 1, 3, 3)), ("3.weight", (10, 144))), 0.1) == {
        "0.weight": 10,
        "3.weight": 138,
    }
    for name, active in (("0.weight", 10), ("3.weight", 138)):
        sent = upload.change[name]
        assert isinstance(sent, wire.Masked)
        assert torch.equal(wire.Masked.of(state.mask[name]).mask, sent.mask)
        assert sent.values.shape == (active,)
    numbers = 8 * (10 + 138) + 5 + 180 + 8 * (4 + 10) + 4 * (4 + 2) + 8  # entries, masks, biases, shapes, loss
    header = wire.size(upload) - numbers
    assert 0 < header < 1000
    dense = case(density=1.0)
    assert isinstance(dense.update(*dense.one_client())[1].change["3.weight"], torch.Tensor)


def test_the_stored_personal_model_has_the_active_entries_only() -> None:
    tried = case(density=0.1)
    down, state, _ = tried.one_client()
    packed = tried.algorithm.client.packed(tried.problem, down, state)
    assert wire.parameters(packed["personal"]) == 10 + 138 + 4 + 10
    personal = tried.algorithm.client.models(tried.problem, down, state)["personal"]
    restored = wire.dense(packed["personal"][0])
    assert all(torch.equal(restored[name], value) for name, value in personal.items())


def test_a_newcomer_trains_its_sparse_model(problem: LeastSquares, tmp_path: Path) -> None:
    """τ' steps of masked SGD from w_T ⊙ m_i, m_i as drawn."""
    simulation = problem.simulate(METHODS["fedspa"].build(TRAINING, tune_epochs=4, tune_lr=0.1), 2, cohort=1)
    newcomers = [i for i in CLIENTS if i not in simulation.store]
    tuned = Store(tmp_path / "tuned", 2**20)
    tune(simulation, tuned, np.array(newcomers), 2)
    for i in newcomers:
        mask = masks(simulation)[i]
        w = shared(simulation) * mask
        for _ in range(4):
            w = w - 0.1 * problem.gradient(i, w) * mask
        np.testing.assert_allclose(tuned.get(i)["model/weight"][0], w, atol=1e-12)
    assert newcomers


def test_masks_rest_without_a_search_and_after_it(problem: LeastSquares) -> None:
    """α_0 = 0 (random static masks), and rounds from T on."""
    static = METHODS["fedspa"].build(TRAINING, prune_rate=0.0)
    assert list(static.client.phases) == ["local"]
    searching = METHODS["fedspa"].build(TRAINING, prune_rate=1.0, search_rounds=2)
    for algorithm, first in ((static, 0), (searching, 2)):
        simulation = problem.simulate(algorithm, 0)
        before = masks(simulation)
        for number in range(first, first + 3):
            simulation.step(number)
        assert np.array_equal(masks(simulation), before)


def test_a_client_without_data_keeps_its_mask() -> None:
    tried = case(density=0.3)
    down, state, data = tried.one_client()
    nothing = {name: batches._replace(real=torch.zeros_like(batches.real)) for name, batches in data.phases.items()}
    after, upload = tried.update(down, state, data._replace(phases=nothing))
    for name, mask in state.mask.items():
        assert torch.equal(after.mask[name], mask)
        assert not wire.dense(upload).change[name].any()


def test_clients_draw_different_masks() -> None:
    with case().simulation() as simulation:
        drawn = simulation.states(0, simulation.down(), np.arange(5)).mask["3.weight"]
    assert len({tuple(mask.flatten().tolist()) for mask in drawn}) == 5


SHAPES = st.lists(st.lists(st.integers(1, 12), min_size=2, max_size=4).map(tuple), min_size=1, max_size=6)


@given(SHAPES, st.floats(0.01, 1.0))
def test_erk_densities(shapes: list[tuple[int, ...]], density: float) -> None:
    """At least 1 and at most all of a layer; together the wanted number, but for rounding; in ERK's proportions."""
    named = tuple((str(number), shape) for number, shape in enumerate(shapes))
    active = active_entries(named, density)
    entries = {name: math.prod(shape) for name, shape in named}
    assert all(1 <= active[name] <= entries[name] for name, _ in named)
    assert abs(sum(active.values()) - density * sum(entries.values())) <= len(shapes)
    # k_l ∝ the sum of the dimensions, for the layers that are neither full nor rounded up to one entry
    free = [(active[name], sum(shape)) for name, shape in named if 1 < active[name] < entries[name]]
    for count, dimensions in free:
        for other, others in free:
            assert (count - 0.5) / dimensions <= (other + 0.5) / others * (1 + 1e-9)


def test_erk_by_hand() -> None:
    """Entries 36, 1440, 20; sums of dimensions 11, 154, 9 = 174; wanted 0.1·1496 = 149.6, 0.8598 of the sums.

    At 0.5, 748 are wanted: a factor of 4.30 would fill the first (47 of 36) and the last (39 of 20). They are full, and
    748 − 56 = 692 are left for the second.
    """
    shapes = (("a", (4, 1, 3, 3)), ("b", (10, 144)), ("c", (4, 5)))
    assert active_entries(shapes, 0.1) == {"a": 9, "b": 132, "c": 8}
    assert active_entries(shapes, 0.5) == {"a": 36, "b": 692, "c": 20}
    assert active_entries(shapes, 1.0) == {"a": 36, "b": 1440, "c": 20}


@pytest.mark.parametrize("options", [{"density": 0.2}, {"prune_rate": 0.0}])
def test_the_variants_keep_the_laws(options: dict[str, float]) -> None:
    check_algorithm(METHODS["fedspa"].build(ROUGH, **options))
