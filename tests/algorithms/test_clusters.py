"""IFCA and FedEM by hand, in float64."""

import numpy as np
import torch

from head_by_hand import INPUTS, LR, PROBLEM, TRAINING, TRUTH, arrays, full_batches, near, other, slopes, softmax
from personafl.algorithms.averaging import Model
from personafl.algorithms.fedavg import fedavg
from personafl.algorithms.fedem import Mixture, fedem
from personafl.algorithms.ifca import Cluster, InSlots, ifca
from personafl.algorithms.slots import slots
from personafl.core import tree
from personafl.core.algorithm import reduce
from personafl.core.tree import Params

PHASES = {"look": 1, "local": 1}
MODELS = [other(2), other(1), other(3)]
STACKED = tree.stack(MODELS)
NAMES = ("0.weight", "1.weight", "1.bias")


def losses(model: Params) -> np.ndarray:
    body, weight, bias = arrays(model)
    return -np.log((softmax(INPUTS @ body.T @ weight.T + bias) * TRUTH).sum(1))


def test_a_client_trains_the_model_of_the_lowest_loss() -> None:
    best = int(np.argmin([losses(model).mean() for model in MODELS]))
    assert best != 0  # where a client is before it looks
    rule = ifca(TRAINING, clusters=3).client
    first = rule.init(PROBLEM, Model(STACKED), torch.Generator())
    state, up = rule.update(PROBLEM, Model(STACKED), first, full_batches(PHASES))
    assert state.member.tolist() == up.member.tolist() == [float(k == best) for k in range(3)]
    slope = slopes(*arrays(MODELS[best]))
    for name in NAMES:
        for k in range(3):
            near(up.change[name][k], -LR * slope[name] if k == best else 0.0 * slope[name])
    personal = rule.models(PROBLEM, Model(STACKED), state)["personal"]
    assert all(torch.equal(personal[name], MODELS[best][name]) for name in NAMES)
    found = rule.personalize(PROBLEM, Model(STACKED), first, full_batches({"tune": 1}))
    assert found.member.tolist() == state.member.tolist()


def test_a_server_averages_by_cluster() -> None:
    """Clients of weight 1, 3 and 2 moved slots 0, 0 and 2 by 1, 5 and 7: the means are (1 + 3·5)/4 = 4, none and 7."""
    rule = ifca(TRAINING, clusters=3).server
    ups = []
    for cluster, by in ((0, 1.0), (0, 5.0), (2, 7.0)):
        member = torch.eye(3).double()[cluster]
        change = {
            name: torch.full_like(value, by) * member.reshape(-1, *[1] * (value.ndim - 1))
            for name, value in STACKED.items()
        }
        ups.append(InSlots(change, member, torch.zeros(()).double()))
    after = rule.update(Model(STACKED), reduce(tree.stack(ups), torch.tensor([1.0, 3.0, 2.0])), 0)
    for name, value in STACKED.items():
        for k, by in enumerate((4.0, 0.0, 7.0)):
            near(after.model[name][k], value[k].numpy() + by)


def test_a_client_of_fedem_trains_all_models_by_their_shares() -> None:
    """q_k(s) ∝ π_k exp(−ℓ_k(s)); π_k = mean of q_k; w_k ← w_k − η ∇ mean of q_k(s) ℓ(w_k; s)."""
    pi = np.array([0.5, 0.2, 0.3])
    rule = fedem(TRAINING, components=3).client
    state, up = rule.update(PROBLEM, Model(STACKED), Mixture(torch.from_numpy(pi)), full_batches(PHASES))
    q = pi * np.exp(-np.stack([losses(model) for model in MODELS], 1))  # [5, 3]
    q /= q.sum(1, keepdims=True)
    near(state.weights, q.mean(0))
    for k, model in enumerate(MODELS):
        body, weight, bias = arrays(model)
        z = INPUTS @ body.T
        delta = q[:, [k]] * (softmax(z @ weight.T + bias) - TRUTH) / 5
        near(up.change["0.weight"][k], -LR * (delta @ weight).T @ INPUTS)
        near(up.change["1.weight"][k], -LR * delta.T @ z)
        near(up.change["1.bias"][k], -LR * delta.sum(0))
    personal = rule.models(PROBLEM, Model(STACKED), state)["personal"]
    assert torch.equal(personal["1.bias"], MODELS[int(q.mean(0).argmax())]["1.bias"])


def test_a_newcomer_to_fedem_learns_its_weights_alone() -> None:
    rule = fedem(TRAINING, components=3, tune_rounds=4).client
    start = rule.init(PROBLEM, Model(STACKED), torch.Generator())
    found = rule.personalize(PROBLEM, Model(STACKED), start, full_batches({"tune": 1}))
    pi, chances = np.ones(3) / 3, np.exp(-np.stack([losses(model) for model in MODELS], 1))
    for _ in range(4):
        q = pi * chances
        pi = (q / q.sum(1, keepdims=True)).mean(0)
    near(found.weights, pi)


def test_one_model_is_fedavg() -> None:
    data, model = full_batches(PHASES), other(1)
    plain = fedavg(TRAINING).client
    down = Model(model)
    expected = plain.update(PROBLEM, down, plain.init(PROBLEM, down, torch.Generator()), data)[1].change
    for algorithm in (ifca(TRAINING, clusters=1), fedem(TRAINING, components=1)):
        rule, alone = algorithm.client, Model({name: value.unsqueeze(0) for name, value in model.items()})
        up = rule.update(PROBLEM, alone, rule.init(PROBLEM, alone, torch.Generator()), data)[1]
        for name, value in expected.items():
            near(up.change[name][0], value.numpy())


def test_starts_differ_and_repeat() -> None:
    start = other(1)
    found = slots(start, 3)
    assert all(torch.equal(found[name][0], value) for name, value in start.items())
    assert not torch.equal(found["0.weight"][1], found["0.weight"][2])
    for k in (1, 2):
        assert sorted(found["0.weight"][k].flatten().tolist()) == sorted(start["0.weight"].flatten().tolist())
    again = slots(start, 3)
    assert all(torch.equal(value, again[name]) for name, value in found.items())


def test_a_client_without_samples_stays_where_it_is() -> None:
    none = full_batches({"look": 0, "local": 0})
    member = torch.tensor([0.0, 0.0, 1.0]).double()
    assert ifca(TRAINING, clusters=3).client.update(PROBLEM, Model(STACKED), Cluster(member), none)[0].member[2] == 1
    weights = torch.tensor([0.2, 0.3, 0.5]).double()
    state = fedem(TRAINING).client.update(PROBLEM, Model(STACKED), Mixture(weights), none)[0]
    assert torch.equal(state.weights, weights)
