"""A first layer in the span of its inputs: the same training, with fewer multiply-adds, where there is such a layer."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from personafl.core import tree
from personafl.core.batches import Batches, Padding, Steps
from personafl.core.descend import Quadratic, descend
from personafl.core.losses import MeanLoss, cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Optimizer, Sgd, by_block, chain, clip_by_global_norm, scale, scale_by_adam, trace
from personafl.core.rng import generator
from personafl.core.seam import using
from personafl.core.tree import Params
from personafl.fast import gram
from personafl.fast.drawing import drawn as fast_drawn
from personafl.fast.halves import first_layer
from personafl.models import zoo

F64 = torch.float64
SIZES = torch.tensor([9, 5, 12]).numpy()
STARTS = torch.tensor([0, 9, 14]).numpy()
POOL = (torch.randn(26, 2, 10, generator=torch.Generator().manual_seed(1), dtype=F64), torch.arange(26) % 3)
STACKED = Batches(None, None, 0, 0, 0, None)  # type: ignore[arg-type]


def net_of(make: Callable[[], nn.Module]) -> Net:
    return Net(make).to(torch.device("cpu"), F64)


MLP = net_of(lambda: zoo.mlp((2, 10), 3, hidden=(6,)))
DROPPING = net_of(lambda: zoo.mlp((2, 10), 3, hidden=(6, 5), dropout=0.4))
UNBIASED = net_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(20, 6, bias=False), nn.Tanh(), nn.Linear(6, 3)))


def params_of(net: Net, seed: int = 0) -> Params:
    return {name: value.to(F64) for name, value in net.init(generator(seed)).items()}


def drawn(epochs: int = 4, batch: int = 4, sizes: object = SIZES) -> Batches:
    """Batches of three clients of unequal size, so some have steps without samples."""
    keys = torch.arange(3).numpy().astype("uint64")
    rows = torch.arange(26).numpy()
    there = torch.from_numpy(rows)
    return fast_drawn(POOL, rows, there, STARTS, sizes, Steps(epochs=epochs, batch=batch), keys, keys)  # type: ignore[arg-type]


def own(batches: Batches, client: int) -> Batches:
    return batches._replace(rows=batches.rows[client], real=batches.real[client], key=batches.key[client])


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each training was in the span, from now on; as often as it is possible."""
    found: list[bool] = []
    made = gram.through_gram_matrix

    def watched(*arguments: object) -> object:
        result = made(*arguments)  # type: ignore[arg-type]
        found.append(result is not None)
        return result

    monkeypatch.setattr(gram, "_GAIN", {"cpu": torch.inf})
    monkeypatch.setattr(gram, "_COPIES", torch.inf)
    monkeypatch.setattr("personafl.fast.training.through_gram_matrix", watched)
    return found


def opaque(objective: MeanLoss) -> Callable[..., Tensor]:
    """The same function, of which nothing is known."""
    return lambda params, batch: objective(params, batch)


OPTIMIZERS = {
    "sgd": scale(-0.2),
    "momentum": chain(trace(0.9), scale(-0.1)),
    "nesterov": chain(trace(0.8, nesterov=True), scale(-0.1)),
    "a rate that is a tensor": scale(torch.tensor(-0.2, dtype=F64)),
    "blocks": by_block({"3.*": scale(-0.1), "*": scale(-0.2)}),
}


SLOPE, ANCHOR = ({name: 0.1 * value for name, value in params_of(MLP, seed).items()} for seed in (5, 6))


def term_of(kind: str, start: Params) -> Quadratic | None:
    return {
        "none": lambda: None,
        "held to the start": lambda: Quadratic(anchor=start, strength=0.3),
        "held": lambda: Quadratic(anchor=ANCHOR, strength=0.3),
        "sloped": lambda: Quadratic(slope=SLOPE),
        "both": lambda: Quadratic(SLOPE, ANCHOR, 0.3),
        "both at the start": lambda: Quadratic(SLOPE, start, 0.3),
    }[kind]()


TERMS = ["none", "held to the start", "held", "sloped", "both", "both at the start"]


def possible(optimizer: str, kind: str) -> bool:
    """A term that is not 0 at the start needs steps that are alike for all parameters."""
    return optimizer != "blocks" or kind in TERMS[:2]


@pytest.fixture(params=["each sample once", "in the order of the steps"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Z has; on a CPU the order of the steps never pays."""
    if request.param != "each sample once":
        monkeypatch.setattr(gram, "most_distinct", lambda _: 0)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("kind", TERMS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_client_takes_the_same_steps(optimizer: str, kind: str, used: list[bool]) -> None:
    start, batches = params_of(MLP), own(drawn(), 0)
    objective, term = MeanLoss(MLP, cross_entropy), term_of(kind, start)
    expected = descend(opaque(objective), start, batches, OPTIMIZERS[optimizer], term=term)
    before = tree.map(torch.clone, start)
    found = descend(objective, start, batches, OPTIMIZERS[optimizer], term=term)
    assert used == [possible(optimizer, kind)]
    assert_close(found, expected, rtol=0, atol=1e-12)
    assert_close(start, before, rtol=0, atol=0)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("kind", TERMS)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("begin", ["together", "apart"])
def test_stacked_clients_take_the_same_steps(begin: str, optimizer: str, kind: str, used: list[bool]) -> None:
    """With gaps, from one model or each from its own."""
    start, batches, objective = params_of(MLP), drawn(), MeanLoss(MLP, cross_entropy)
    starts = tree.map(lambda value: torch.stack([value, 2 * value, -value]), start)

    def trained(objective: Callable[..., Tensor], own_start: Params, steps: Batches) -> tuple[Params, Tensor]:
        begun = start if begin == "together" else own_start
        return descend(objective, begun, steps, OPTIMIZERS[optimizer], term=term_of(kind, begun))

    every = vmap(partial(trained, objective), in_dims=(0, STACKED))
    plain = vmap(partial(trained, opaque(objective)), in_dims=(0, STACKED))
    expected = plain(starts, batches)
    found = every(starts, batches)
    assert used == [possible(optimizer, kind)]
    assert_close(found, expected, rtol=0, atol=1e-12)


DECAYED = {
    "decay": Sgd(lr=0.2, weight_decay=0.3),
    "momentum": Sgd(lr=0.1, momentum=0.9, weight_decay=0.3),
    "nesterov": Sgd(lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.3),
}


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("kind", TERMS)
@pytest.mark.parametrize("spec", DECAYED)
def test_weight_decay_is_taken_along(spec: str, kind: str, stacked: bool, used: list[bool]) -> None:
    """As a term beside the method's own. With gaps where clients are stacked, and also where there is no such layer."""
    start, objective, optimizer = params_of(MLP), MeanLoss(MLP, cross_entropy), DECAYED[spec].at(torch.zeros(()))

    def trained(objective: Callable[..., Tensor], optimizer: Optimizer) -> tuple[Params, Tensor]:
        def one(steps: Batches) -> tuple[Params, Tensor]:
            return descend(objective, start, steps, optimizer, term=term_of(kind, start))

        return vmap(one, in_dims=(STACKED,))(drawn()) if stacked else one(own(drawn(), 0))

    with using({}):
        expected = trained(objective, optimizer)
    for objective_ in (objective, opaque(objective)):
        assert_close(trained(objective_, optimizer), expected, rtol=0, atol=1e-12)
    assert used == [True]


@pytest.mark.parametrize("net", [MLP, DROPPING, UNBIASED], ids=["mlp", "with dropout", "without bias"])
def test_other_networks_do(net: Net, used: list[bool]) -> None:
    start, objective = params_of(net), MeanLoss(net, cross_entropy)
    for batches in (own(drawn(), 2), own(drawn(epochs=1), 1)):
        expected = descend(opaque(objective), start, batches, OPTIMIZERS["sgd"])
        assert_close(descend(objective, start, batches, OPTIMIZERS["sgd"]), expected, rtol=0, atol=1e-12)
    assert used == [True, True]


@pytest.mark.parametrize("fixed", ["3.", "1.bias"])
def test_a_part_of_the_network_may_be_fixed(fixed: str, used: list[bool]) -> None:
    whole, batches = params_of(MLP), own(drawn(), 0)
    held = {name: value for name, value in whole.items() if name.startswith(fixed)}
    start = {name: value for name, value in whole.items() if name not in held}
    objective = MeanLoss(MLP, cross_entropy, held)
    expected = descend(opaque(objective), start, batches, OPTIMIZERS["sgd"])
    found = descend(objective, start, batches, OPTIMIZERS["sgd"])
    assert used == [True]
    assert found[0].keys() == start.keys()
    assert_close(found, expected, rtol=0, atol=1e-12)


def test_multiply_adds() -> None:
    """The docstring's count for the first layer; the second one is as ever."""
    net, n = net_of(lambda: nn.Sequential(nn.Linear(400, 8), nn.ReLU(), nn.Linear(8, 3))), 12
    start, epochs = params_of(net), 5
    pool = (torch.randn(n, 400, dtype=F64), torch.arange(n) % 3)
    key = torch.zeros(1).numpy().astype("uint64")
    rows, size = torch.arange(n).numpy(), torch.tensor([n]).numpy()
    batches = own(
        fast_drawn(pool, rows, torch.from_numpy(rows), 0 * size, size, Steps(epochs=epochs, batch=4), key, key), 0
    )
    assert gram.through_gram_matrix(MeanLoss(net, cross_entropy), start, batches, scale(-0.1), None) is not None
    with FlopCounterMode(display=False) as counter:
        descend(MeanLoss(net, cross_entropy), start, batches, scale(-0.1))
    first = n * 400 * (2 * 8 + n) + epochs * n * n * 8
    assert counter.get_total_flops() == 2 * (first + epochs * n * 3 * 8 * 3)


class _Around(nn.Module):
    """Needs its input after the first layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 6), nn.Linear(26, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.last(torch.cat([self.first(x), x], -1))


class _Twice(nn.Module):
    """Uses its first layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 20), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.first(x.flatten(1)).relu()))


NONE = {
    "convolution first": lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(24, 3)),
    "dropout first": lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(20, 3)),
    "input needed later": _Around,
    "layer used twice": _Twice,
    "a vector per place": lambda: nn.Sequential(nn.Linear(10, 4), nn.Flatten(), nn.Linear(8, 3)),
}


@pytest.mark.parametrize("name", NONE)
def test_networks_without_such_a_layer(name: str) -> None:
    net = net_of(NONE[name])
    assert first_layer(net, net.shapes, POOL[0]) is None


def test_the_layer_is_the_first_that_is_trained() -> None:
    net = net_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(20, 6), nn.Dropout(0.0), nn.ReLU(), nn.Linear(6, 3)))
    first, last = first_layer(net, net.shapes, POOL[0]), first_layer(net, ["4.weight", "4.bias"], POOL[0])
    assert first is not None
    assert last is not None
    assert (first.weight, first.bias, last.weight, last.bias) == ("1.weight", "1.bias", "4.weight", "4.bias")
    assert first.features.shapes == {}
    assert first.rest.shapes.keys() == {"4.weight", "4.bias"}
    assert last.features.shapes.keys() == {"1.weight", "1.bias"}


@pytest.mark.parametrize(
    "optimizer", [chain(clip_by_global_norm(1.0), scale(-0.1)), chain(scale_by_adam(), scale(-0.1))]
)
def test_steps_that_are_not_linear_in_the_gradients_stay_as_they_are(optimizer: Optimizer, used: list[bool]) -> None:
    descend(MeanLoss(MLP, cross_entropy), params_of(MLP), own(drawn(), 0), optimizer)
    assert used == [False]


def test_it_happens_where_it_is_less_work_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    net = net_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 3)))
    objective, start = MeanLoss(net, cross_entropy), params_of(net)

    def pays(batches: Batches, term: Quadratic | None = None) -> bool:
        return gram.through_gram_matrix(objective, start, batches, scale(-0.1), term) is not None

    assert pays(own(drawn(epochs=4), 1))
    assert not pays(own(drawn(epochs=1), 1))
    assert not pays(own(drawn(epochs=4), 1)._replace(padding=Padding()))  # samples are not counted
    monkeypatch.setattr(gram, "_COPIES", 0)
    assert not pays(own(drawn(epochs=4), 1))
