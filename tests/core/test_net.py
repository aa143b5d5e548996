"""Networks as pure functions: equality with the module, keyed dropout, normalisation policies, and what is refused."""

from __future__ import annotations

import copy
import math
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from personafl.core import tree
from personafl.core.net import Net
from personafl.errors import BadInput
from personafl.fast.table import enabled
from personafl.fast.trial import try_stacked

F64 = torch.float64


@pytest.fixture(params=["plain", "fast"], autouse=True)
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    with enabled() if request.param == "fast" else nullcontext():
        yield


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def convnet() -> nn.Module:
    layers = (nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 3))
    return nn.Sequential(*layers).double()


class Positions(nn.Module):
    """A constant in a buffer, drawn at random when the module is made, and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.randn(4, dtype=F64))
        self.gain = nn.Parameter(torch.tensor(2.0, dtype=F64))
        self.line = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x * self.gain + self.positions)


class Tied(nn.Module):
    """One matrix that encodes and decodes, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 4, bias=False).double(), nn.Linear(4, 4, bias=False).double()
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.encode(x)))


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (6, 4)),
    "convnet": (convnet, (6, 2, 4, 4)),
    "buffers": (Positions, (6, 4)),
    "tied": (Tied, (6, 4)),
}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_apply_equals_forward(name: str) -> None:
    """apply(init(), x) = module(x) for a given module, also stacked; the module itself is not touched."""
    make, shape = MODULES[name]
    module, x = make(), normal(0, *shape)
    before = copy.deepcopy(module.state_dict())
    net = Net(module)
    params = net.init(torch.Generator())
    torch.testing.assert_close(net.apply(params, x), module(x), rtol=0, atol=1e-12)
    stacked = vmap(net.apply, in_dims=(0, None))(tree.stack([params, tree.scale(params, 2.0)]), x)
    torch.testing.assert_close(stacked[0], module(x), rtol=0, atol=1e-12)
    assert not torch.allclose(stacked[0], stacked[1])
    torch.testing.assert_close(net.probe(x), module(x), rtol=0, atol=1e-12)
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())


@pytest.mark.parametrize("name", sorted(MODULES))
def test_apply_uses_the_given_parameters_only(name: str) -> None:
    """Loading the same numbers into a fresh module gives the same outputs."""
    make, shape = MODULES[name]
    module, x = make(), normal(0, *shape)
    net = Net(module)
    params = {key: normal(9, *value.shape) for key, value in net.init(torch.Generator()).items()}
    with torch.no_grad():
        for key, value in module.named_parameters():
            value.copy_(params[key])
    torch.testing.assert_close(net.apply(params, x), module(x), rtol=0, atol=1e-12)


def test_init_is_reproducible_and_leaves_the_global_generator_alone() -> None:
    """Equal generators draw equal starts, the next draw differs, and making a net or a start moves no global state."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    net = Net(mlp)
    one = net.init(torch.Generator().manual_seed(1))
    again = net.init(torch.Generator().manual_seed(1))
    other = net.init(torch.Generator().manual_seed(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert list(one) == list(net.shapes)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_one_generator_draws_different_starts() -> None:
    """The generator moves on."""
    net, generator = Net(mlp), torch.Generator().manual_seed(1)
    assert not torch.equal(net.init(generator)["0.weight"], net.init(generator)["0.weight"])


def test_a_makers_constants_do_not_depend_on_the_global_generator() -> None:
    """Random features in a buffer are the same in every process, so a resumed or shipped net is the same function."""
    x = normal(0, 3, 4)
    params = Net(Positions).init(torch.Generator().manual_seed(1))
    outputs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        outputs.append(Net(Positions).apply(params, x))
    assert torch.equal(*outputs)


def test_a_given_module_keeps_its_weights() -> None:
    """Pre-trained weights are the start, whatever the generator, as copies."""
    module = mlp()
    net = Net(module)
    start = net.init(torch.Generator().manual_seed(3))
    assert all(torch.equal(start[name], value) for name, value in module.named_parameters())
    start["0.weight"].zero_()
    assert torch.equal(net.init(torch.Generator())["0.weight"], module.get_parameter("0.weight"))


def test_parameters_are_counted_once() -> None:
    """4·5+5 + 5·3+3 = 43; a tied 4×4 matrix is 16 and has one name; buffers do not count."""
    assert Net(mlp()).parameters == 43
    assert (Net(Tied()).parameters, list(Net(Tied()).shapes)) == (16, ["encode.weight"])
    assert Net(Positions()).parameters == 1 + 4 * 3 + 3


def test_the_gradient_of_a_tied_weight_sums_both_uses() -> None:
    """Same gradient as autograd's on the module."""
    module, x = Tied(), normal(0, 6, 4)
    net = Net(module)
    gradient = torch.func.grad(lambda p: net.apply(p, x).square().sum())(net.init(torch.Generator()))
    module(x).square().sum().backward()
    expected = module.encode.weight.grad
    assert expected is not None
    torch.testing.assert_close(gradient["encode.weight"], expected, rtol=0, atol=1e-12)


def test_missing_or_foreign_parameters_are_refused() -> None:
    """Else functional_call would silently use the weights the module came with."""
    net, x = Net(mlp()), normal(0, 2, 4)
    params = net.init(torch.Generator())
    with pytest.raises(ValueError, match=r"2\.bias"):
        net.apply({name: value for name, value in params.items() if name != "2.bias"}, x)
    with pytest.raises(ValueError, match="other"):
        net.apply(params | {"other": x}, x)


def test_float64_constants_on_integer_inputs() -> None:
    """After `to`, constants and the probe's parameters are of one dtype though the inputs (tokens) have none."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.line = nn.Embedding(5, 4), nn.Linear(4, 2)
            self.register_buffer("offset", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.line(self.table(x).mean(1) + self.offset)

    net = Net(Bag()).to(torch.device("cpu"), F64)
    assert net.probe(torch.tensor([[0, 1], [2, 4]])).dtype == F64


# --- dropout ---------------------------------------------------------------------------------------------------------


def dropped(layer: nn.Module, x: Tensor, key: int | None) -> Tensor:
    net = Net(nn.Sequential(layer))
    return net.apply({}, x, key=None if key is None else torch.tensor(key))


def test_dropout_is_the_identity_without_key() -> None:
    """Scoring passes no key."""
    x = normal(0, 8, 5)
    assert torch.equal(dropped(nn.Dropout(0.7), x, None), x)
    assert torch.equal(dropped(nn.Dropout(0.0), x, 3), x)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_share_and_scaling(p: float) -> None:
    """Entries are 0 with probability p (n = 40 000: within 5·√(p(1−p)/n)), else x/(1−p): the mean is kept."""
    out = dropped(nn.Dropout(p), torch.ones(200, 200, dtype=F64), 11)
    share = float((out == 0).double().mean())
    assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / out.numel())
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 1 / (1 - p)), rtol=0, atol=1e-12)


def test_dropout_differs_per_key_and_repeats() -> None:
    """The mask is a function of the key: equal for equal keys, independent (agreeing half the time) for neighbours."""
    x = torch.ones(100, 100, dtype=F64)
    one, again, other = (dropped(nn.Dropout(0.5), x, key) != 0 for key in (4, 4, 5))
    assert torch.equal(one, again)
    assert abs(float((one == other).double().mean()) - 0.5) < 0.03


def test_dropout_under_vmap_equals_one_by_one() -> None:
    """Each client has its key; stacked masks are the ones drawn alone."""
    net = Net(nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.4), nn.Linear(50, 3)).double())
    params, x = net.init(torch.Generator()), normal(0, 3, 6, 4)
    keys = torch.tensor([1, -(2**62), 2**63 - 1])
    stacked = vmap(lambda x, key: net.apply(params, x, key=key))(x, keys)
    for client in range(3):
        alone = net.apply(params, x[client], key=keys[client])
        torch.testing.assert_close(stacked[client], alone, rtol=0, atol=1e-12)


def test_dropout_does_not_depend_on_padding() -> None:
    """The first rows of a wider batch are dropped as in the narrow one."""
    x = normal(0, 9, 5)
    assert torch.equal(dropped(nn.Dropout(0.5), x, 7)[:4], dropped(nn.Dropout(0.5), x[:4], 7))


def agree(a: Tensor, b: Tensor) -> float:
    return float(((a == 0) == (b == 0)).double().mean())


def test_layers_calls_and_shared_layers_drop_independently() -> None:
    """Two layers, one layer called twice, and one layer under two names: every pass has a mask of its own, so two
    masks at p = ½ agree on half of 10 000 entries, and none is on without key.
    """

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.other = nn.Dropout(0.5), nn.Dropout(0.5)
            self.same = nn.Sequential(self.drop)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.drop(x), self.drop(x), self.other(x), self.same(x)])

    net, x = Net(Twice()), torch.ones(100, 100, dtype=F64)
    masks = net.apply({}, x, key=torch.tensor(1))
    for a in range(4):
        for b in range(a):
            assert abs(agree(masks[a], masks[b]) - 0.5) < 0.03, (a, b)
    assert torch.equal(net.apply({}, x, key=torch.tensor(1)), masks)
    assert torch.equal(net.apply({}, x), x.expand(4, 100, 100))


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Dropout1d, (30, 20, 7)), (nn.Dropout2d, (30, 20, 4, 5)), (nn.Dropout3d, (30, 20, 2, 3, 2))]
)
def test_channel_dropout_drops_whole_channels(layer: Any, shape: tuple[int, ...]) -> None:
    """A channel of a sample is all zero or all 1/(1−p); of 600 channels a share p ± 5σ is dropped."""
    out = dropped(layer(0.3), torch.ones(shape, dtype=F64), 5).flatten(2)
    assert torch.equal(out.amin(2), out.amax(2))
    share = float((out[:, :, 0] == 0).double().mean())
    assert abs(share - 0.3) < 5 * math.sqrt(0.21 / 600)


@pytest.mark.parametrize("layer", [nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2), nn.RReLU()])
def test_other_random_layers_are_refused(layer: nn.Module) -> None:
    """Alpha dropout is no plain dropout (it keeps SELU's moments), so it must not silently become one."""
    with pytest.raises(BadInput, match=rf"layer 0 is {type(layer).__name__}, which is not supported; use nn\.\w+$"):
        Net(nn.Sequential(layer))


# --- normalisation ---------------------------------------------------------------------------------------------------


def normed(*, affine: bool = True, track: bool = True) -> nn.Module:
    norm = nn.BatchNorm2d(4, affine=affine, track_running_stats=track)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    if track:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(torch.arange(4.0))
        norm.running_var.copy_(torch.arange(1.0, 5.0))
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm).double()


def test_running_statistics_are_refused_by_name() -> None:
    """Layers are named, whatever their kind."""
    module = nn.Sequential(nn.Sequential(nn.BatchNorm1d(3)), nn.InstanceNorm1d(3, track_running_stats=True))
    with pytest.raises(BadInput, match=r"layers 0\.0, 1 keep running statistics") as caught:
        Net(module)
    assert "\n" not in str(caught.value)


def test_shared_uses_the_fixed_statistics_and_never_changes_them() -> None:
    """(x − μ)/√(σ² + ε)·γ + β with the module's own μ, σ²: the module in eval mode; also after training passes."""
    module, x = normed(), normal(1, 6, 2, 5, 5)
    net = Net(module, "shared")
    params = net.init(torch.Generator())
    expected = module.eval()(x)
    for real in (None, torch.tensor([True] * 4 + [False] * 2)):
        got = net.apply(params, x, real, torch.tensor(0))
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    vmap(net.apply)(tree.stack([params, params]), torch.stack([x, x + 1]))
    torch.testing.assert_close(net.apply(params, x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("affine", [True, False])
def test_dropped_equals_batch_norm_of_the_real_samples(affine: bool) -> None:
    """F.batch_norm(training=True) on the real samples alone; what padding holds makes no difference; no state stays."""
    module, x = normed(affine=affine), normal(1, 6, 2, 5, 5)
    net = Net(module, "dropped")
    params = net.init(torch.Generator())
    norm = module.get_submodule("1")
    real = torch.tensor([True, False, True, True, False, True])
    hidden = module.get_submodule("0")(x[real])
    expected = F.batch_norm(hidden, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)
    torch.testing.assert_close(net.apply(params, x, real)[real], expected, rtol=0, atol=1e-12)
    wild = torch.where(real[:, None, None, None], x, 1e6)
    torch.testing.assert_close(net.apply(params, wild, real)[real], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(net.apply(params, x[real]), expected, rtol=0, atol=1e-12)


def test_dropped_under_vmap_with_masks_per_client() -> None:
    """Stacked = one by one, each client with its own padding."""
    net = Net(normed(), "dropped")
    params, x = net.init(torch.Generator()), normal(2, 3, 4, 2, 5, 5)
    real = torch.tensor([[True] * 4, [True, True, False, False], [True, False, False, False]])
    stacked = vmap(lambda x, real: net.apply(params, x, real))(x, real)
    for client in range(3):
        torch.testing.assert_close(stacked[client], net.apply(params, x[client], real[client]), rtol=0, atol=1e-12)


def test_batch_norm_without_running_statistics_needs_no_policy_but_the_mask() -> None:
    """It always uses the batch, so it is accepted by default, and padding must be inert there too."""
    module, x = normed(track=False), normal(1, 6, 2, 5, 5)
    net = Net(module)
    real = torch.tensor([True] * 4 + [False] * 2)
    got = net.apply(net.init(torch.Generator()), x, real)[:4]
    torch.testing.assert_close(got, module(x[:4]), rtol=0, atol=1e-12)
    assert net.batch_dependent


def test_instance_norm_dropped_uses_each_samples_statistics() -> None:
    """As torch.nn.functional.instance_norm without running statistics; shared: the fixed ones."""
    module, x = nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True)).double(), 3 + normal(1, 4, 3, 6)
    net = Net(module, "dropped")
    for _ in range(2):
        torch.testing.assert_close(net.apply({}, x), F.instance_norm(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(Net(module, "shared").apply({}, x), module.eval()(x), rtol=0, atol=1e-12)


def test_threads_may_share_a_network() -> None:
    """Each has the outputs of its own parameters, though a call puts them into one module."""

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.001)
            return x * self.gain

    net = Net(Slow())

    def outputs(gain: int) -> list[float]:
        return [float(net.apply({"gain": torch.tensor([float(gain)])}, torch.ones(1))) for _ in range(10)]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(outputs, range(4))) == [[gain] * 10 for gain in range(4)]


# --- probe -----------------------------------------------------------------------------------------------------------


class Fails(nn.Module):
    """A forward() that a stacked run cannot take."""

    def __init__(self, forward: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.line, self.then = nn.Linear(4, 3).double(), forward

    def forward(self, x: Tensor) -> Any:
        return self.then(self.line(x))


class BranchOnInput(nn.Module):
    """Looks at the data before any parameter comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x if x.sum() > 0 else -x)


class Plain(torch.autograd.Function):
    """An old-style function: it runs forward, but torch.func cannot differentiate it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


def raise_assertion(x: Tensor) -> Tensor:
    raise AssertionError("first line\nsecond line")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Fails(lambda h: F.dropout(h, 0.5, training=True)), "draws at random"),
        (Fails(lambda h: F.rrelu(h, training=True)), "draws at random"),
        (Fails(lambda h: h + torch.rand(1)), "draws at random"),
        (Fails(lambda h: h.reshape(7, 13)), "does not accept this data's inputs of shape"),
        (Fails(raise_assertion), r"inputs of shape \[4\]: AssertionError: first line; check it$"),
        (Fails(lambda h: (h, h)), "returns a tuple"),
    ],
)
def test_probe_says_what_does_not_work(module: nn.Module, message: str) -> None:
    """One line, as BadInput, before any training."""
    with pytest.raises(BadInput, match=message) as caught:
        Net(module).probe(normal(0, 6, 4))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "module",
    [Fails(lambda h: h * h.sum().item()), BranchOnInput(), Fails(Plain.apply)],
    ids=["item", "branch", "plain"],
)
def test_a_trial_says_why_clients_cannot_be_stacked(module: nn.Module) -> None:
    """One line; for one client at a time it works."""
    net, x = Net(module), normal(0, 6, 4)
    torch.testing.assert_close(net.probe(x), module(x).detach())
    assert net.unstackable is None
    try_stacked(net, x)
    assert net.unstackable
    assert "\n" not in net.unstackable


def test_probe_names_the_shape_it_was_given() -> None:
    """Inputs of 5 numbers for a network of 4."""
    with pytest.raises(BadInput, match=r"inputs of shape \[5\]") as caught:
        Net(mlp()).probe(normal(0, 6, 5))
    assert "\n" not in str(caught.value)


def test_probe_does_not_change_the_data() -> None:
    """Even if the first layer works in place; it is then run on a copy."""
    net, x = Net(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3)).double()), normal(0, 6, 4)
    before = x.clone()
    net.probe(x)
    assert torch.equal(x, before)


def test_frozen_parameters_are_constants() -> None:
    """A pre-trained body with requires_grad=False is neither trained nor sent, and keeps its values."""
    body, head = nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 2)
    net = Net(nn.Sequential(body, head))
    x = torch.randn(5, 3)
    assert net.shapes.keys() == {"1.weight", "1.bias"}
    params = {name: value + 1 for name, value in net.init(torch.Generator()).items()}
    expected = nn.functional.linear(body(x), head.weight + 1, head.bias + 1)
    assert torch.equal(net.apply(params, x), expected.detach())
    assert net.probe(x).shape == (5, 2)


def test_a_network_travels_to_other_machines() -> None:
    net, x = Net(mlp), normal(0, 2, 4)
    params = net.init(torch.Generator())
    there = pickle.loads(pickle.dumps(net))
    assert torch.equal(there.apply(params, x), net.apply(params, x))


def test_what_other_threads_draw_is_not_the_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = Net(mlp), normal(0, 2, 4)
    states = (torch.tensor([number]) for number in range(9))
    monkeypatch.setattr(torch, "get_rng_state", lambda: next(states))
    assert net.probe(x).shape == (2, 3)
