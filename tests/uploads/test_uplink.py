"""Compressed uploads: the forms, error feedback worked in numpy, and whole runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import personafl
from least_squares import Vector, half_square, shared, simulator
from personafl import api
from personafl.algorithms import METHODS, Training
from personafl.algorithms.fedavg import FedAvgClient
from personafl.core import rng, tree, wire
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.batches import Data, Steps
from personafl.core.net import Net
from personafl.core.optim import Adaptive, Sgd
from personafl.core.prox import as_matrix
from personafl.errors import BadInput, Diverged
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.simulate.engine import gather
from personafl.simulate.simulator import Simulation
from personafl.storage.rundir import RunDirectory
from personafl.storage.store import Store
from personafl.testing import check_algorithm, make_case
from personafl.uploads.codecs import Codec, LowRank, TopEntries, Whole
from personafl.uploads.uplink import compressed
from tiers import HEART, tiered

TRAINING = Training(work=Steps(epochs=2, batch=4), optimizer=Sgd(lr=0.1, momentum=0.9, weight_decay=1e-3, clip=1.0))
ADAM = Training(work=Steps(steps=3, batch=5), optimizer=Adaptive(lr=0.01))
CODECS: dict[str, Codec] = {
    "sparse": TopEntries(keep=0.1),
    "low-rank": LowRank(rank=2),
    "sparse, forgetful": TopEntries(keep=0.1, error_feedback=False),
    "low-rank, forgetful": LowRank(rank=2, error_feedback=False),
}


# --- laws ---


@pytest.mark.parametrize(
    ("method", "codec"),
    [
        *(("fedavg", "sparse, forgetful"), ("fedavg", "low-rank, forgetful")),  # neither has a state
        *(("ditto", "sparse"), ("fedalt", "low-rank"), ("finetune", "sparse")),
    ],
)
def test_laws(method: str, codec: str) -> None:
    check_algorithm(compressed(METHODS[method].build(TRAINING), CODECS[codec]))


@pytest.mark.parametrize("codec", ["sparse", "low-rank"])
def test_laws_where_rounding_would_choose(codec: str) -> None:
    """Adam's first steps are all of one size, and pull and Adam together magnify noise where a weight never moves."""
    check_algorithm(compressed(METHODS["ditto"].build(ADAM), CODECS[codec]))


@pytest.mark.parametrize("method", tiered(METHODS, {*HEART, "fedspa", "local"}))
def test_every_method_can_be_compressed(method: str) -> None:
    """Two rounds; Local sends no model, and FedSpa sends few entries of its own choice: nothing to compress."""
    training = Training(work=Steps(epochs=1, batch=8), optimizer=Sgd(lr=0.1))
    sizes = {}
    for name, codec in {"dense": Whole(), "sparse": TopEntries(), "low-rank": LowRank(rank=1)}.items():
        with make_case(compressed(METHODS[method].build(training), codec)).simulation() as simulation:
            sizes[name] = [simulation.step(number).bytes_up for number in range(2)]
    for name in ("sparse", "low-rank"):
        same = method in ("local", "binaryrelax", "fedspa")  # nothing to send, or a form of its own
        assert sizes[name] == sizes["dense"] if same else sizes[name] < sizes["dense"]


# --- the forms ---


def weights(*shape: int, count: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn((count, *shape), generator=rng.generator("uplink", *shape), dtype=dtype)


@pytest.mark.parametrize(("keep", "count"), [(0.1, 3), (0.11, 4), (0.5, 15), (0.01, 1), (1.0, 30)])
def test_the_largest_entries_are_sent(keep: float, count: int) -> None:
    """k = ⌈keep·30⌉, also where 0.1·30 > 3 in floating point; the rest is what is left."""
    weight = weights(5, 6)[0]
    form, left = TopEntries(keep=keep).divide(weight)
    order = np.argsort(-weight.abs().numpy().reshape(-1))[:count]
    expected = np.zeros(30)
    expected[order] = weight.numpy().reshape(-1)[order]
    sent = wire.dense({"w": form})["w"]
    assert np.array_equal(sent.numpy(), expected.reshape(5, 6))
    assert torch.equal(sent + left, weight)


def test_few_entries_are_sent_with_their_places_more_with_a_mask() -> None:
    """4 bytes for each place sent, or a bit for every entry: places up to 1 entry in 32."""
    forms = {keep: type(TopEntries(keep=keep).divide(weights(40, 50)[0])[0]) for keep in (0.01, 0.03, 0.04, 0.5)}
    assert forms == {0.01: wire.Sparse, 0.03: wire.Sparse, 0.04: wire.Masked, 0.5: wire.Masked}


def test_equal_entries_are_taken_in_order_whatever_their_last_bits() -> None:
    """Entries that differ by rounding alone are equal: the first ones are sent."""
    weight = torch.ones(2, 8, dtype=torch.float64)
    weight[1, ::2] *= 1 + 2**-52
    weight[0, 3] = -1.0
    assert TopEntries(keep=0.25).divide(weight)[1].reshape(-1).nonzero().reshape(-1).tolist() == list(range(4, 16))


@pytest.mark.parametrize("shape", [(9, 14), (14, 9), (4, 3, 3, 2), (6, 5, 4)])
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_factors_are_the_best_approximation(shape: tuple[int, ...], rank: int) -> None:
    """Eckart–Young: the first terms of numpy's singular value decomposition of the matrix form."""
    weight = weights(*shape)[0]
    sent, left = LowRank(rank=rank).divide(weight)
    u, s, v = np.linalg.svd(as_matrix(weight).numpy(), full_matrices=False)
    best = (u[:, :rank] * s[:rank]) @ v[:rank]
    np.testing.assert_allclose(as_matrix(sent.dense()).numpy(), best, atol=1e-12)
    np.testing.assert_allclose((sent.dense() + left).numpy(), weight.numpy(), atol=1e-12)
    assert abs(left.norm().item() - np.sqrt((s[rank:] ** 2).sum())) < 1e-12
    assert sent.sound(weight.numel())


def test_rows_and_columns_of_zeros_stay_zero() -> None:
    """A pixel that is always black does not move, nor does a unit that is never active."""
    weight = weights(9, 14)[0]
    weight[2], weight[:, 5] = 0.0, 0.0
    sent, left = LowRank(rank=2).divide(weight)
    for part in (sent.dense(), left):
        assert not part[2].any()
        assert not part[:, 5].any()


@pytest.mark.parametrize("codec", [TopEntries(keep=0.2), LowRank(rank=2)])
def test_stacked_weights(codec: TopEntries | LowRank) -> None:
    """Under vmap, a stack of forms that `dense_each` restores."""
    stack = weights(9, 14, count=3)
    sent, left = torch.func.vmap(codec.divide)(stack)
    one_by_one = [codec.divide(weight) for weight in stack]
    for row, dense in enumerate(wire.dense_each({"w": sent})["w"]):
        np.testing.assert_allclose(dense.numpy(), one_by_one[row][0].dense().numpy(), atol=1e-13)
        np.testing.assert_allclose(left[row].numpy(), one_by_one[row][1].numpy(), atol=1e-13)
    assert wire.size_of_one({"w": sent}) == wire.size({"w": one_by_one[0][0]})


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("codec", [TopEntries(keep=0.2), LowRank(rank=2)])
def test_what_is_not_finite_is_not_hidden(codec: TopEntries | LowRank, bad: float) -> None:
    """The simulator looks for it in the upload."""
    weight = weights(9, 14)[0]
    weight[8, 3] = bad
    assert not torch.isfinite(codec.divide(weight)[0].dense()).all()


# --- what is compressed ---


def one_update(algorithm: Algorithm) -> tuple[Any, Any]:
    case = make_case(algorithm)
    down, state, data = case.one_client()
    return case.update(down, state, data)


def first(stacked: Data) -> Data:
    """Return the data of the first of stacked clients."""
    phases = {name: b._replace(rows=b.rows[0], real=b.real[0], key=b.key[0]) for name, b in stacked.phases.items()}
    return stacked._replace(phases=phases, examples=stacked.examples[0])


def test_only_what_becomes_smaller_is_compressed() -> None:
    """Biases of 6 and 10 entries would not, by the bytes of their parts' names alone; nor would the loss."""
    for codec, form in ((TopEntries(), wire.Masked), (LowRank(rank=2), wire.Factored)):
        state, upload = one_update(compressed(METHODS["fedavg"].build(TRAINING), codec))
        forms = {name: type(leaf) for name, leaf in upload.change.items()}
        assert forms == {"1.weight": form, "4.weight": form, "1.bias": Tensor, "4.bias": Tensor}
        assert type(upload.loss) is Tensor
        assert state.error.keys() == {"change/1.weight", "change/4.weight"}
        whole = one_update(METHODS["fedavg"].build(TRAINING))[1]
        for name in upload.change:
            parts = [wire.size({"change": {name: up.change[name]}}) for up in (upload, whole)]
            assert parts[0] < parts[1] if "weight" in name else parts[0] == parts[1]


@pytest.mark.parametrize("codec", [TopEntries(keep=1.0), LowRank(rank=6), Whole()])
def test_everything_kept_is_the_method_itself(codec: Codec) -> None:
    """keep = 1 and full rank would not be smaller than the weight, so they are the dense path, to the bit."""
    models = []
    for algorithm in (METHODS["ditto"].build(TRAINING), compressed(METHODS["ditto"].build(TRAINING), codec)):
        with make_case(algorithm).simulation() as simulation:
            for number in range(3):
                simulation.step(number)
            states = [list(simulation.store.get(client).values()) for client in range(5)]
            models.append([*tree.leaves(simulation.server), *itertools.chain(*states)])
    assert all(torch.equal(a, b) for a, b in zip(*models, strict=True))


def test_one_sample_and_one_step_have_rank_one() -> None:
    """Then rank 1 loses nothing: FedAvg to rounding, and errors are zero to rounding."""
    training = Training(work=Steps(steps=1, batch=1), optimizer=Sgd(lr=0.3))
    servers = []
    for codec in (Whole(), LowRank(rank=1)):
        with make_case(compressed(METHODS["fedavg"].build(training), codec)).simulation() as simulation:
            for number in range(3):
                simulation.step(number)
            servers.append(simulation.server.model)
    for client in range(5):  # of the second, which is the last
        assert all(leaf.abs().max() < 1e-15 for leaf in simulation.store.get(client).values())
    for name, value in servers[0].items():
        np.testing.assert_allclose(servers[1][name].numpy(), value.numpy(), atol=1e-13)


class Packing(FedAvgClient):
    """A rule that sends some of its weights in a compact form by itself, and has options of its own."""

    uploads_of_state = ("nothing",)

    def update(self, problem: Problem, down: Any, state: Any, data: Any) -> Any:
        state, up = super().update(problem, down, state, data)
        u, v = up.change["1.weight"][:, :3], up.change["1.weight"][:3, :]
        factors = wire.Factored(u, v, torch.tensor(up.change["1.weight"].shape, dtype=torch.int32))
        return state, up._replace(change=up.change | {"1.weight": factors})

    def packed(self, problem: Problem, down: Any, state: Any) -> dict[str, Any]:
        return {"global": (down.model, type(state).__name__)}


def test_forms_and_further_methods_of_a_rule_are_its_own() -> None:
    plain = METHODS["fedavg"].build(TRAINING)
    algorithm = compressed(Algorithm("packing", Packing(training=TRAINING), plain.server), TopEntries())
    state, upload = one_update(algorithm)
    assert isinstance(upload.change["1.weight"], wire.Factored)
    assert isinstance(upload.change["1.weight"].u, Tensor)
    assert state.error.keys() == {"change/4.weight"}
    assert algorithm.client.uploads_of_state == ("nothing",)
    case = make_case(plain)
    assert algorithm.client.packed is not None
    assert algorithm.client.packed(case.problem, case.one_client()[0], state)["global"][1] == "Empty"  # type: ignore[comparison-overlap]
    assert compressed(plain, TopEntries()).client.packed is None


def test_a_quantized_model_stays_quantized_with_compressed_uploads() -> None:
    """Its device then takes neither the shared model nor a blend with it, which have all their bits."""
    quantized = compressed(METHODS["quped"].build(TRAINING, bits=2), TopEntries())
    assert quantized.client.bits_of(make_case(quantized).problem) == 2


# --- error feedback ---

WIDE = 64  # unknowns: with few, a quarter of them with a mask and its name would be more bytes than all


def quarter(**changes: Any) -> TopEntries:
    return TopEntries(keep=0.25, **changes)


def one_step(lr: float) -> Algorithm:
    return METHODS["fedavg"].build(Training(work=Steps(steps=1, batch=None), optimizer=Sgd(lr=lr)))


def linear_problem() -> Problem:
    module = nn.Linear(WIDE, 1, bias=False).double()
    nn.init.zeros_(module.weight)
    return Problem(Net(module), half_square)


@pytest.mark.parametrize("error_feedback", [True, False])
def test_rounds_by_hand(tmp_path: Path, error_feedback: bool) -> None:
    """a_i = −η∇f_i(w) + e_i; the 16 largest of 64 entries are sent, e_i are the others; w ← w + Σ p_i sent_i."""
    sizes, lr, generator = (30, 80, 50), 0.05, np.random.default_rng(3)
    x, y = generator.normal(size=(sum(sizes), WIDE)), generator.normal(size=sum(sizes))
    algorithm = compressed(one_step(lr), quarter(error_feedback=error_feedback))
    simulation = simulator(tmp_path, x, y, sizes, linear_problem())(algorithm, 6)
    owners = np.repeat(range(3), sizes)
    w, errors = np.zeros(WIDE), np.zeros((3, WIDE))
    for _ in range(6):
        move = np.zeros(WIDE)
        for i, size in enumerate(sizes):
            own_x, own_y = x[owners == i], y[owners == i]
            a = errors[i] - lr * own_x.T @ (own_x @ w - own_y) / size
            sent = np.where(np.abs(a) >= np.sort(np.abs(a))[-16], a, 0.0)
            errors[i] = a - sent if error_feedback else 0.0
            move += size / sum(sizes) * sent
        w = w + move
    np.testing.assert_allclose(shared(simulation), w, atol=1e-13)
    assert len(simulation.store) == (3 if error_feedback else 0)  # FedAvg itself keeps nothing
    for i in range(3 if error_feedback else 0):
        np.testing.assert_allclose(simulation.store.get(i)["error/change/weight"][0].numpy(), errors[i], atol=1e-13)


@pytest.mark.parametrize("codec", [TopEntries(keep=0.1), LowRank(rank=1)])
def test_nothing_is_lost(codec: TopEntries | LowRank) -> None:
    """Σ sent + e_i = Σ up_i over rounds in which the server sends anything at all."""
    plain = METHODS["fedavg"].build(TRAINING)
    case, bare = make_case(compressed(plain, codec)), make_case(plain)
    down, state, _ = case.one_client()
    due, sent = tree.zeros_like(down.model), tree.zeros_like(down.model)
    generator = rng.generator("downs")
    for number in range(7):
        moved = tree.map(lambda w: w + 0.1 * torch.randn(w.shape, generator=generator, dtype=w.dtype), down)
        data = first(gather(case.data, np.array([1]), plain.client.phases, 1, number))
        due = tree.add(due, bare.update(moved, (), data)[1].change)
        state, upload = case.update(moved, state, data)
        sent = tree.add(sent, wire.dense(upload).change)
    assert {path.removeprefix("change/") for path in state.error} == {"1.weight", "4.weight"}
    for name, value in due.items():
        late = state.error.get(f"change/{name}", torch.zeros(()))
        np.testing.assert_allclose((sent[name] + late).numpy(), value.numpy(), atol=1e-12)
    assert state.error["change/1.weight"].abs().max() > 1e-3


def disagreeing(tmp_path: Path) -> tuple[Callable[..., Simulation], Vector]:
    """f_i(w) = ½‖w − b_i‖² for two clients: b_1 and b_2 are ±10 in the first 16 entries and both 1 in the other 48.

    The optimum is their mean. From w = 0 the gradients' largest quarter is the first 16 entries, where they cancel.
    """
    targets = np.ones((2, WIDE))
    targets[0, :16], targets[1, :16] = 10.0, -10.0
    x = np.tile(np.eye(WIDE) * np.sqrt(WIDE), (2, 1))  # a mean over 64 samples
    y = (targets * np.sqrt(WIDE)).reshape(-1)
    return simulator(tmp_path, x, y, (WIDE, WIDE), linear_problem()), targets.mean(axis=0)


@pytest.mark.parametrize("lr", [0.5, 0.05])
def test_without_feedback_what_clients_disagree_on_crowds_out_the_rest(tmp_path: Path, lr: float) -> None:
    """Both send the first 16 entries, which cancel: w stays at 0, 48 entries away from the optimum, at any rate."""
    simulate, optimum = disagreeing(tmp_path)
    simulation = simulate(compressed(one_step(lr), quarter(error_feedback=False)), 100)
    assert not shared(simulation).any()
    assert np.array_equal(optimum, np.repeat([0.0, 1.0], [16, 48]))


@pytest.mark.parametrize("lr", tiered([0.2, 0.05], [0.2]))
def test_with_feedback_the_distance_to_the_optimum_is_in_proportion_to_the_rate(tmp_path: Path, lr: float) -> None:
    """Late entries add up until they exceed the 10η that a disagreed one has each time: so much w lacks, at most.

    It does not reach the optimum at a constant rate: the clients' own gradients do not vanish there, and are sent in
    turns for ever.
    """
    simulate, optimum = disagreeing(tmp_path)
    rounds = int(20 / lr)
    simulation = simulate(compressed(one_step(lr), quarter()), rounds)
    distances = []
    for number in range(rounds, rounds + 40):
        simulation.step(number)
        distances.append(np.abs(shared(simulation) - optimum).max())
    assert lr < max(distances) < 10 * lr


def test_with_feedback_an_optimum_that_suits_all_is_reached(tmp_path: Path) -> None:
    """y_i = X_i w*: three different problems whose gradients all vanish at w*, and so what is late vanishes too."""
    sizes, generator = (60, 160, 100), np.random.default_rng(3)
    x, optimum = generator.normal(size=(sum(sizes), WIDE)), generator.normal(size=WIDE)
    simulate = simulator(tmp_path, x, x @ optimum, sizes, linear_problem())
    simulation = simulate(compressed(one_step(0.2), quarter()), 400)
    np.testing.assert_allclose(shared(simulation), optimum, atol=1e-9)
    for client in range(3):
        assert simulation.store.get(client)["error/change/weight"].abs().max() < 1e-9


# --- runs ---


def recipe(**sections: Any) -> dict[str, Any]:
    return {
        "rounds": 3,
        "data": {"partition": {"kind": "iid", "clients": 6}, "unseen": 1, "validation": 0.2},
        "model": {"name": "mlp", "hidden": [64], "personal": "output"},
        "training": {"steps": 2},
        "engine": {"threads": 1, "checkpoint_seconds": 0.0},
        **sections,
    }


FORMS: dict[str, dict[str, Any]] = {"sparse": {"form": "sparse", "keep": 0.1}, "low-rank": {"form": "low-rank"}}


@pytest.mark.parametrize("finetune", [False, True])
@pytest.mark.parametrize(
    ("method", "form"),
    [
        *(("fedavg", "sparse"), ("ditto", "low-rank"), ("fedalt", "sparse"), ("finetune", "low-rank")),
        ("fedslr", "sparse"),
    ],
)
def test_a_run_has_the_models_it_has_without(tmp_path: Path, method: str, form: str, finetune: bool) -> None:
    """The same rows (global, personal, tuned, chosen; seen and unseen clients), and fewer bytes up."""
    values = recipe(method={"name": method}, finetune=finetune)
    plain = personafl.run(values, out=tmp_path / "plain")
    small = personafl.run({**values, "uplink": FORMS[form]}, out=tmp_path / "small")
    keys = ("model", "clients", "split", "count", "bytes_down")
    assert [[row[key] for key in keys] for row in small.rows] == [[row[key] for key in keys] for row in plain.rows]
    assert small.rows[0]["bytes_up"] < 0.4 * plain.rows[0]["bytes_up"]
    assert api.as_recipe(tmp_path / "small" / "recipe.toml").uplink.form == form


def test_bytes_are_those_of_the_uploads(tmp_path: Path) -> None:
    """A tenth of the entries at 4 bytes, and a bit for every entry: 0.1 + 1/32, and a little for names and biases."""
    totals = {}
    for name, uplink in {"plain": {"form": "dense"}, **FORMS}.items():
        values = recipe(model={"name": "mlp", "hidden": [256]}, uplink=uplink, data={"partition": {"kind": "iid"}})
        totals[name] = personafl.run(values, out=tmp_path / name).rows[0]["bytes_up"]
        fed = prepare(Recipe.parse(values)).federation
        simulation = Simulation(fed, Store(tmp_path / "states", 2**20))
        rule, down = fed.algorithm.client, simulation.down()
        data = first(gather(fed.data, fed.data.seen[:1], rule.phases, 0, 0))
        state = rule.init(fed.problems[0], down, rng.generator("any"))
        upload = rule.update(fed.problems[0], down, state, data)[1]
        assert totals[name] == 3 * fed.cohort * len(wire.encode(upload))
    assert 0.131 < totals["sparse"] / totals["plain"] < 0.15
    assert totals["low-rank"] < totals["plain"] / 5


def outcome(path: Path) -> dict[str, Any]:
    checkpoint = RunDirectory(path).checkpoint()
    states = Store(path / "states", 2**20, checkpoint.states)
    return {
        "server": [entry.read_bytes() for entry in path.glob("server-*.safetensors")],
        "states": {client: wire.encode(states.get(client)) for client in states.clients.tolist()},
        "clients": (path / "clients.csv").read_text(),
        "bytes": (checkpoint.bytes_up, checkpoint.bytes_down),
    }


class Crash(BaseException):
    pass


def crash(progress: object) -> None:
    raise Crash


@pytest.mark.parametrize(("method", "form"), [("fedavg", "sparse"), ("ditto", "low-rank")])
def test_resume_continues_to_the_same_bits(tmp_path: Path, method: str, form: str) -> None:
    """Stopped after every round."""
    values = recipe(method={"name": method}, uplink=FORMS[form], federation={"cohort": 3}, rounds=3)
    personafl.run(values, out=tmp_path / "straight")
    with pytest.raises(Crash):
        personafl.run(values, out=tmp_path / "stopped", listener=crash)
    for _ in range(2):
        with pytest.raises(Crash):
            personafl.resume(tmp_path / "stopped", listener=lambda method, seed: crash)
    personafl.resume(tmp_path / "stopped")
    straight = outcome(tmp_path / "straight")
    assert outcome(tmp_path / "stopped") == straight
    assert straight["states"]


def test_variants_of_a_comparison(tmp_path: Path) -> None:
    """One pre-training, with dense uploads, for all of them."""
    values = recipe(
        pretrain={"rounds": 1},
        uplink={"form": "sparse", "keep": 0.5},
        compare={
            "methods": ["fedavg", "tenth", "low-rank", "dense"],
            "variants": {
                "tenth": {"method": {"name": "fedavg"}, "uplink": {"keep": 0.1}},
                "low-rank": {"method": {"name": "fedavg"}, "uplink": {"form": "low-rank", "rank": 2}},
                "dense": {"method": {"name": "fedavg"}, "uplink": {"form": "dense"}},
            },
        },
    )
    comparison = personafl.compare(values, out=tmp_path / "all")
    assert comparison.failures == ()
    up = {result.rows[0]["method"]: result.rows[0]["bytes_up"] for result in comparison.results}
    assert up["low-rank"] < up["tenth"] < up["fedavg"] < up["dense"]
    before = api.recipe_of(tmp_path / "all" / "pretrain-seed0")
    assert before.uplink == Whole()


@pytest.mark.parametrize("form", FORMS)
def test_divergence_is_named(tmp_path: Path, form: str) -> None:
    values = recipe(uplink=FORMS[form], training={"steps": 3, "lr": 1e30})
    with pytest.raises(Diverged, match=r"round 1: training gave non-finite numbers for clients"):
        personafl.run(values, out=tmp_path / "run")


def test_a_bad_uplink_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"uplink\.keep: unknown key; valid: error_feedback, form, rank"):
        personafl.run(recipe(uplink={"form": "low-rank", "keep": 0.1}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
