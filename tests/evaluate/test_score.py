"""Scores per client: in one pass for a shared model, stacked or one by one for personal ones, equal to a plain loop."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import personafl.evaluate.score as score
from personafl.core.algorithm import Problem
from personafl.core.losses import correct, cross_entropy
from personafl.core.net import Net
from personafl.core.rng import generator
from personafl.core.tree import Params
from personafl.data.federated import FederatedData, Ragged, make_federated
from personafl.models import zoo


def data_of(sizes: Sequence[int], shape: tuple[int, ...] = (1, 8, 8), sequence: int = 0) -> FederatedData:
    """Clients with so many test rows each, drawn at random from a pool that is not in their order."""
    rng = np.random.default_rng(0)
    count = max(sum(sizes), 1)
    torch_rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(12, (count, sequence), generator=torch_rng) if sequence else None
    order = rng.permutation(count)
    rows = Ragged.from_lists(np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1]))
    return make_federated(
        name="pool",
        x=torch.randn(count, *shape, generator=torch_rng).double() if tokens is None else tokens,
        y=torch.arange(count) % 5 if tokens is None else tokens.roll(-1, 1) % 6 - 1,  # -1 is not scored
        classes=5,
        train=rows,
        validation=Ragged.empty(len(sizes)),
        test=rows,
        seen=np.arange(len(sizes)),
        unseen=np.zeros(0, np.int64),
        client_names=tuple(map(str, range(len(sizes)))),
        label_names=tuple("01234"),
        vocabulary=None if tokens is None else 12,
    )


NETS = {
    "mlp": lambda: zoo.mlp((1, 8, 8), 5, hidden=(7,)),
    "cnn": lambda: zoo.cnn((1, 8, 8), 5, channels=(2, 3), hidden=6),
    "window": lambda: zoo.TextWindow(12, 5, context=3, width=2, hidden=4),
    "dropped norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)),
    "dropped norm cnn": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 5)),
}
SIZES = [(4, 1, 3), (0, 5, 2, 0, 1), (1, 2, 0), (0, 0), (3,), (20, 1, 0, 7)]


def net_of(name: str) -> Net:
    return Net(NETS[name], "dropped").to(torch.device("cpu"), torch.float64)


def params_of(net: Net, seed: int) -> Params:
    return {name: value.double() for name, value in net.init(generator(seed)).items()}


def plain(net: Net, models: list[Params], data: FederatedData, clients: list[int]) -> np.ndarray:
    """[clients, 2] accuracy and loss, client by client."""
    result = []
    for params, client in zip(models, clients, strict=True):
        rows = data.test[client]
        if not len(rows):
            result.append([np.nan, np.nan])
            continue
        output, target = net.apply(params, data.x[rows]), data.y[rows]
        result.append([correct(output, target).double().mean().item(), cross_entropy(output, target).mean().item()])
    return np.array(result)


@pytest.mark.parametrize("stacked", [False, True])
def test_each_token_of_a_client_counts_alike(stacked: bool) -> None:
    """Accuracy, loss and perplexity are torch's over all tokens of a client, however they are cut into sequences."""
    data, net = data_of((3, 1, 2), (6,), sequence=6), net_of("window")
    data.y[:, 2:][::2] = -1  # every other sequence is short
    problem, clients = Problem(net, cross_entropy, data=data.shape), np.arange(3)
    params = params_of(net, 0)
    if stacked:
        models = {name: torch.stack([value, value, value]) for name, value in params.items()}
        scores = score.try_personal(problem, models, data, data.test, clients).scores()
    else:
        scores = score.try_shared(problem, params, data, data.test, clients).scores()
    for client in range(3):
        output, target = net.apply(params, data.x[data.test[client]]).flatten(0, 1), data.y[data.test[client]].flatten()
        loss = functional.cross_entropy(output, target, ignore_index=-1)
        hits = (output.argmax(-1) == target)[target >= 0].double().mean()
        assert scores.loss[client] == pytest.approx(float(loss), abs=1e-12)
        assert scores.accuracy[client] == pytest.approx(float(hits), abs=1e-7)  # shares are single precision
        assert scores.metrics["perplexity"][client] == pytest.approx(float(loss.exp()), rel=1e-12)


def test_perplexity_is_of_cross_entropy_alone() -> None:
    """A loss of the user's has no perplexity, and a client without tests has none."""
    data, net = data_of((0, 2), (6,), sequence=6), net_of("window")
    own = Problem(net, lambda outputs, targets: cross_entropy(outputs, targets) + 1, data=data.shape)
    assert score.try_shared(own, params_of(net, 0), data, data.test, np.arange(2)).scores().metrics == {}
    problem = Problem(net, cross_entropy, data=data.shape)
    found = score.try_shared(problem, params_of(net, 0), data, data.test, np.arange(2))
    assert np.isnan(found.scores().metrics["perplexity"]).tolist() == [True, False]
    other = found.of(np.array([1])).scores()
    assert other.loss[0] == found.scores().loss[1]


@pytest.mark.parametrize("few", [False, True], ids=["at once", "in pieces"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", NETS)
def test_shared_personal_and_a_plain_loop_agree(
    name: str, sizes: tuple[int, ...], few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if few:
        monkeypatch.setattr(score, "PASS", 2)
    net, data = net_of(name), data_of(sizes, sequence=9 if name == "window" else 0)
    clients = np.arange(len(sizes))[::-1].copy()  # in the order asked for
    params = params_of(net, 1)
    stacked = {key: torch.stack([value] * len(sizes)) for key, value in params.items()}
    expected = plain(net, [params] * len(sizes), data, clients.tolist())
    for scores in (
        score.try_shared(Problem(net, cross_entropy), params, data, data.test, clients).scores(),
        score.try_personal(Problem(net, cross_entropy), stacked, data, data.test, clients).scores(),
    ):
        np.testing.assert_array_equal(scores.samples, np.array(sizes)[clients])
        np.testing.assert_allclose(scores.accuracy, expected[:, 0], rtol=1e-6)
        np.testing.assert_allclose(scores.loss, expected[:, 1], rtol=1e-10)


@pytest.mark.parametrize("name", NETS)
def test_every_client_is_scored_with_its_own_model(name: str) -> None:
    net, data = net_of(name), data_of((4, 0, 6, 1), sequence=9 if name == "window" else 0)
    clients = np.array([2, 0, 3, 1])
    models = [params_of(net, seed) for seed in range(4)]
    stacked = {key: torch.stack([params[key] for params in models]) for key in models[0]}
    scores = score.try_personal(Problem(net, cross_entropy), stacked, data, data.test, clients).scores()
    expected = plain(net, models, data, clients.tolist())
    np.testing.assert_allclose(scores.accuracy, expected[:, 0], rtol=1e-6)
    np.testing.assert_allclose(scores.loss, expected[:, 1], rtol=1e-10)


@pytest.mark.parametrize("name", ["mlp", "cnn", "dropped norm cnn"])
def test_what_clients_share_is_computed_for_all_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one body for all, even convolutions go through together; the scores are those of whole own models."""
    net, data = net_of(name), data_of((4, 0, 6, 1))
    clients, models = np.array([3, 0, 2, 1]), [params_of(net, seed) for seed in range(4)]
    output = list(net.shapes)[-2:]
    models = [models[0] | {key: params[key] for key in output} for params in models]
    whole = {key: torch.stack([params[key] for params in models]) for key in net.shapes}
    expanded = {key: value if key in output else value[0].expand_as(value) for key, value in whole.items()}
    calls, apply = [], Net.apply
    monkeypatch.setattr(Net, "apply", lambda *arguments: calls.append(1) or apply(*arguments))
    scores = score.try_personal(Problem(net, cross_entropy), expanded, data, data.test, clients).scores()
    assert len(calls) == 1
    expected = score.try_personal(Problem(net, cross_entropy), whole, data, data.test, clients).scores()
    assert len(calls) == 2 if name == "mlp" else len(calls) == 4  # kernels of their own: client by client
    np.testing.assert_array_equal(scores.accuracy, expected.accuracy)
    np.testing.assert_allclose(scores.loss, expected.loss, rtol=1e-12)
    np.testing.assert_allclose(scores.loss, plain(net, models, data, clients.tolist())[:, 1], rtol=1e-12)


def test_a_pass_has_fewer_samples_of_those_that_are_large() -> None:
    net = Net(lambda: nn.Linear(4, 3))
    assert score._at_once(net) == score.PASS
    net.sample_bytes = score._MEMORY // 100
    assert score._at_once(net) == 100
    net.sample_bytes = 2 * score._MEMORY
    assert score._at_once(net) == 1


def test_similar_clients_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of at most so many samples with padding; a client that is larger than that is alone.

    Clients that hardly differ stay in their order, in which their models need not be copied.
    """
    assert [group.tolist() for group in score._similar(np.array([3, 1, 2, 5, 4]), 8, 12)] == [[0, 1, 2], [3, 4]]
    monkeypatch.setattr(score, "_PADDING", 1)
    groups = [group.tolist() for group in score._similar(np.array([0, 5, 2, 3, 0, 20, 4, 6]), 8, 12)]
    assert groups == [[2, 3, 6], [1, 7], [5]]
    assert [len(group) for group in score._similar(np.array([1, 1, 1]), 1, 12)] == [1, 1, 1]


def test_gains_are_paired_sample_by_sample() -> None:
    """Two clients with samples and one without: sums of right, right², sure, sure² and right·sure by hand."""
    sizes = np.array([2, 0, 1])
    own = score.Outcomes(hits=np.array([1.0, 0.0, 1.0]), losses=np.log([2.0, 4.0, 1.0]), sizes=sizes)
    shared = score.Outcomes(hits=np.array([0.0, 1.0, 1.0]), losses=np.log([4.0, 4.0, 2.0]), sizes=sizes)
    gains = own.gains_over(shared)  # right: 1, -1 | 0; sure: 1/4, 0 | 1/2
    np.testing.assert_allclose(gains.right, [0, 0, 0])
    np.testing.assert_allclose(gains.right_squared, [2, 0, 0])
    np.testing.assert_allclose(gains.sure, [0.25, 0, 0.5])
    np.testing.assert_allclose(gains.sure_squared, [0.0625, 0, 0.25])
    np.testing.assert_allclose(gains.right_sure, [0.25, 0, 0])
    np.testing.assert_array_equal(gains.samples, sizes)


def test_outcomes_of_some_clients_in_another_order() -> None:
    outcomes = score.Outcomes(hits=np.arange(6.0), losses=-np.arange(6.0), sizes=np.array([2, 0, 3, 1]))
    some = outcomes.of(np.array([3, 1, 0]))
    np.testing.assert_array_equal(some.hits, [5, 0, 1])
    np.testing.assert_array_equal(some.losses, [-5, 0, -1])
    np.testing.assert_array_equal(some.sizes, [1, 0, 2])


def test_no_clients_at_all() -> None:
    net, data = net_of("mlp"), data_of((2,))
    params = params_of(net, 0)
    none = np.zeros(0, np.int64)
    stacked = {key: value.new_zeros(0, *value.shape) for key, value in params.items()}
    assert len(score.try_shared(Problem(net, cross_entropy), params, data, data.test, none).scores().accuracy) == 0
    assert len(score.try_personal(Problem(net, cross_entropy), stacked, data, data.test, none).scores().accuracy) == 0
