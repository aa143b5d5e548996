"""Training with products in bfloat16: about the same, with weights that stay exact, one by one and stacked."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from personafl.core import tree
from personafl.core.batches import Data, Steps
from personafl.core.descend import descend
from personafl.core.losses import MeanLoss, cross_entropy
from personafl.core.net import Net
from personafl.core.optim import scale
from personafl.core.rng import generator
from personafl.core.tree import Params
from personafl.fast import gram
from personafl.fast.bfloat16 import exactly, rounded_products, rounding
from personafl.fast.drawing import drawn as fast_drawn
from personafl.simulate.engine import Engine, Strategy

CPU = torch.device("cpu")
CLIENTS = 3
POOL = (torch.randn(48, 1, 12, 12, generator=torch.Generator().manual_seed(1)), torch.arange(48) % 5)


def drawn(epochs: int = 2) -> Data:
    """Return batches of three clients of unequal size."""
    sizes, keys = torch.tensor([9, 16, 12]).numpy(), torch.arange(CLIENTS).numpy().astype("uint64")
    starts, rows = torch.tensor([0, 9, 25]).numpy(), torch.arange(48).numpy()
    batches = fast_drawn(POOL, rows, torch.from_numpy(rows), starts, sizes, Steps(epochs=epochs, batch=4), keys, keys)
    return Data({"local": batches}, torch.from_numpy(sizes), torch.tensor(0.0))


NETS = {
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 160), nn.Tanh(), nn.Linear(160, 5)
    ),
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 160), nn.ReLU(), nn.Linear(160, 160), nn.Linear(160, 5)),
    "norm": lambda: nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.LayerNorm(800), nn.Linear(800, 5, bias=False)
    ),
}


def trained(name: str, strategy: Strategy, *, bfloat16: bool, epochs: int = 2) -> tuple[Params, Params]:
    """Return the start, and all clients' weights after training."""
    net = Net(NETS[name])
    start = net.init(generator(0))
    objective = MeanLoss(net, cross_entropy)

    def update(down: Params, state: Params, data: Data) -> Params:
        return descend(objective, down, data.phases["local"], scale(-0.05))[0]

    result: Params = Engine(strategy, CLIENTS, bfloat16=bfloat16).train(update, start, {}, drawn(epochs))
    return start, result


def apart(one: Params, other: Params, start: Params) -> float:
    """Return how far two results are from each other, relative to how far one is from the start."""
    gaps = torch.cat([(one[name] - other[name]).flatten() for name in one])
    moved = torch.cat([(one[name] - start[name]).flatten() for name in one])
    return float(gaps.norm() / moved.norm())


@pytest.mark.parametrize("strategy", ["sequential", "stacked"])
@pytest.mark.parametrize("name", NETS)
def test_training_is_about_the_same_and_weights_stay_exact(name: str, strategy: Strategy) -> None:
    start, exact = trained(name, strategy, bfloat16=False)
    _, about = trained(name, strategy, bfloat16=True)
    assert {value.dtype for value in tree.leaves(about)} == {torch.float32}
    assert 1e-5 < apart(exact, about, start) < 0.05
    assert not rounding(start[next(iter(start))])


@pytest.mark.parametrize("name", NETS)
def test_stacked_clients_are_rounded_as_single_ones_are(name: str) -> None:
    start, one_by_one = trained(name, "sequential", bfloat16=True)
    _, stacked = trained(name, "stacked", bfloat16=True)
    assert apart(one_by_one, stacked, start) < 0.05


def test_a_layer_in_the_span_of_its_inputs_stays_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NETS, "softmax", lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 5)))
    monkeypatch.setattr(gram, "_COPIES", 10**6)
    monkeypatch.setitem(gram._ROUNDED_GAIN, "cpu", 100.0)
    monkeypatch.setitem(gram._GAIN, "cpu", 100.0)
    start, exact = trained("softmax", "stacked", bfloat16=False, epochs=6)
    _, about = trained("softmax", "stacked", bfloat16=True, epochs=6)
    assert apart(exact, about, start) < 1e-5  # as it is not without a span:
    monkeypatch.setitem(gram._ROUNDED_GAIN, "cpu", 0.0)
    _, rounded = trained("softmax", "stacked", bfloat16=True, epochs=6)
    assert apart(exact, rounded, start) > 1e-4


def test_products_are_exact_where_that_is_asked_for() -> None:
    one, other = torch.randn(4, 8), torch.randn(8, 3)
    with rounded_products(CPU):
        assert (one @ other).dtype == torch.bfloat16
        with exactly(one):
            assert_close(one @ other, torch.mm(one.double(), other.double()).float())
        assert rounding(one)
    assert exactly(one) is exactly(other)  # nothing to enter
