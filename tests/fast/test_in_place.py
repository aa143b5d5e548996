"""Networks that write into what they are given: the same numbers as those that do not, one by one and stacked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from personafl.algorithms import METHODS, Training
from personafl.core.algorithm import Problem
from personafl.core.batches import Steps
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.core.split import Split
from personafl.core.tree import Params
from personafl.fast.gradient import step
from personafl.fast.trial import try_stacked
from personafl.testing import close, everything, make_case

CLIENTS, SAMPLES, INPUTS = 3, 5, 6
ACTIVATIONS: list[Callable[..., nn.Module]] = [
    nn.ReLU, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.ReLU6, nn.Hardtanh, nn.SiLU, nn.Mish, nn.Hardswish,
    nn.Hardsigmoid, lambda **told: nn.Threshold(0.1, 0.2, **told),
]  # fmt: skip


def scaled(h: Tensor, inplace: bool) -> Tensor:
    if inplace:
        h *= 2
        return h
    return h * 2


def shifted(h: Tensor, inplace: bool) -> Tensor:
    """Part of it."""
    if inplace:
        h[:, 1:3].sub_(1)
        return h
    return h - torch.eye(h.shape[1], dtype=h.dtype)[1:3].sum(0)


def residual(h: Tensor, inplace: bool) -> Tensor:
    around = torch.tanh(h)
    if inplace:
        h += around
        return h
    return h + around


FUNCTIONS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "F.relu": lambda h, inplace: F.relu(h, inplace=inplace),
    "relu_": lambda h, inplace: h.relu_() if inplace else h.relu(),
    "scaled": scaled,
    "shifted": shifted,
    "residual": residual,
}


class After(nn.Module):
    """Calls a function after a linear layer, also one of sequences [samples, 2, width]."""

    def __init__(self, function: Callable[[Tensor, bool], Tensor], inplace: bool, *, sequences: bool = False) -> None:
        super().__init__()
        self.function, self.inplace, self.sequences = function, inplace, sequences
        self.first, self.last = nn.Linear(INPUTS, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(torch.stack([x, -x], 1) if self.sequences else x)
        return self.last(self.function(h, self.inplace)).flatten(1)


def modules() -> dict[str, Callable[[bool], nn.Module]]:
    found: dict[str, Callable[[bool], nn.Module]] = {}
    for act in ACTIVATIONS:
        name = type(act()).__name__
        found[name] = lambda inplace, act=act: nn.Sequential(  # type: ignore[misc]
            nn.Linear(INPUTS, 4), act(inplace=inplace), nn.Linear(4, 3), act(inplace=inplace)
        )
    for name, function in FUNCTIONS.items():
        found[name] = lambda inplace, function=function: After(function, inplace)  # type: ignore[misc]
    found["sequences"] = lambda inplace: After(residual, inplace, sequences=True)
    found["pooled"] = lambda inplace: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.ReLU(inplace), nn.MaxPool2d((1, 2)), nn.Flatten(),
        nn.Linear(4, 3), nn.ReLU(inplace),
    )  # fmt: skip
    found["wide"] = lambda inplace: nn.Sequential(nn.Linear(INPUTS, 4000), nn.ReLU(inplace), nn.Linear(4000, 3))
    return found


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("name", modules())
def test_a_step(name: str, shared: bool) -> None:
    """From parameters that clients share, as in the first step, and from their own; torch's tape on the module is the
    oracle: −γ∇ of the mean square of the outputs.
    """
    torch.manual_seed(0)
    module = modules()[name](True).double()
    plain = modules()[name](False).double()
    plain.load_state_dict(module.state_dict())
    net, x = Net(module), torch.randn(CLIENTS, SAMPLES, INPUTS, dtype=torch.float64)
    params = {key: value.expand(CLIENTS, *value.shape) for key, value in net.init(torch.Generator()).items()}
    if not shared:
        params = {key: value + 0.1 * torch.randn_like(value) for key, value in params.items()}

    def objective(w: Params, batch: Tensor) -> Tensor:
        return net.apply(w, batch).square().mean()

    def own(w: Params, batch: Tensor) -> Params:
        return step(objective, w, batch, -0.1)[0]

    try_stacked(net, x[0])
    assert net.unstackable is None
    stacked = vmap(own)(params, x)
    for client in range(CLIENTS):
        start = {key: value[client] for key, value in params.items()}
        alone = own(start, x[client])
        plain.load_state_dict(start)
        plain.zero_grad()
        plain(x[client]).square().mean().backward()
        for key, value in plain.named_parameters():
            assert value.grad is not None
            expected = value.detach() - 0.1 * value.grad
            torch.testing.assert_close(stacked[key][client], expected, rtol=0, atol=1e-13)
            torch.testing.assert_close(alone[key], expected, rtol=0, atol=1e-13)


class Raw(nn.Module):
    """Brings its inputs to another unit, in place or not."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10))

    def forward(self, x: Tensor) -> Tensor:
        if self.inplace:
            x -= 0.3
            return self.layers(x)
        return self.layers(x - 0.3)


@pytest.mark.parametrize("method", ["pfedme", "quped", "apfl", "fedalt"])
def test_a_network_that_writes_into_its_inputs(method: str) -> None:
    """pFedMe steps several times on a minibatch, QuPeD and APFL show it to two models."""
    training = Training(work=Steps(steps=2, batch=4), optimizer=Sgd(lr=0.1))
    outcomes: list[dict[str, Any]] = []
    for inplace, strategy in ((False, "sequential"), (True, "sequential"), (True, "stacked")):
        torch.manual_seed(0)
        net = Net(Raw(inplace).double())
        case = make_case(METHODS[method].build(training), Problem(net, cross_entropy, split=Split(("layers.3.*",))))
        with case.simulation(strategy) as simulation:  # type: ignore[arg-type]
            simulation.step(0)
            outcomes.append(everything(simulation))
    for other in outcomes[1:]:
        close(outcomes[0], other, 1e-12)


def test_neither_module_nor_samples_are_changed() -> None:
    torch.manual_seed(0)
    module, x = Raw(True).double(), torch.rand(2, 1, 8, 8, dtype=torch.float64)
    before, samples = copy.deepcopy(module.state_dict()), x.clone()
    net = Net(module)
    for _ in range(2):
        net.apply(net.init(torch.Generator()), x)
        vmap(lambda w: net.apply(w, x))({key: value.unsqueeze(0) for key, value in net.init(torch.Generator()).items()})
    assert torch.equal(x, samples)
    assert module.inplace
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())


def test_a_network_that_writes_a_clients_numbers_into_a_shared_place_is_not_stacked() -> None:
    """A constant has no room for every client's sum. A parameter has it, if every client has its own; but not if it is
    frozen and all have the same one.
    """

    class Onto(nn.Module):
        def __init__(self, parameter: bool) -> None:
            super().__init__()
            self.line = nn.Linear(INPUTS, 3)
            self.place = nn.Parameter(torch.zeros(3)) if parameter else torch.zeros(3)

        def forward(self, x: Tensor) -> Tensor:
            total = self.place.expand(len(x), -1).clone()
            total += self.line(x)
            return total

    for parameter in (True, False):
        net = Net(Onto(parameter))
        try_stacked(net, torch.rand(2, INPUTS))
        assert net.unstackable is not None


def test_a_relu_that_others_see_is_not_put_after_pooling() -> None:
    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(3, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            h = x + 0
            return self.pool(h) + h

    x = torch.randn(2, 1, 4, 4)
    assert torch.equal(Net(Seen()).apply({}, x), Seen()(x))


@pytest.mark.parametrize("inplace", [True, False])
def test_after_a_trial_inputs_are_copied_only_for_a_network_that_writes_into_them(inplace: bool) -> None:
    """Also for clients that are stacked, where it cannot be seen."""
    net, seen = Net(nn.Sequential(nn.ReLU(inplace=inplace), nn.Linear(INPUTS, 3))), list[Tensor]()
    x = torch.randn(CLIENTS, SAMPLES, INPUTS)
    try_stacked(net, x[0])
    net._module.register_forward_pre_hook(lambda _, inputs: seen.append(*inputs))
    vmap(lambda own: seen.append(own) or net.apply(net.init(torch.Generator()), own))(x)  # type: ignore[func-returns-value]
    assert (seen[0] is seen[1]) is not inplace
