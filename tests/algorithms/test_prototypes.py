"""FedProto and FedPAC by hand, in float64."""

import numpy as np
import torch

from head_by_hand import (
    INPUTS,
    LR,
    PROBLEM,
    TARGETS,
    TRAINING,
    TRUTH,
    arrays,
    full_batches,
    near,
    other,
    slopes,
    softmax,
)
from personafl.algorithms.features import ClassMeans, ClassSums
from personafl.algorithms.fedalt import Own
from personafl.algorithms.fedpac import Aligned, Felt, fedpac
from personafl.algorithms.fedproto import Prototypes, Told, fedproto
from personafl.algorithms.personal import Personal
from personafl.core import tree
from personafl.core.algorithm import reduce
from personafl.core.tree import Params

MEANS = np.array([[0.5, -1.0], [0.3, 0.2], [-0.6, 0.9], [7.0, 7.0]])
KNOWN = np.array([1.0, 0.0, 1.0, 0.0])
CLASSES = ClassMeans(torch.from_numpy(MEANS), torch.from_numpy(KNOWN))
NONE = torch.zeros(()).double()


def pulled(body: np.ndarray, strength: float) -> np.ndarray:
    """λ (1/5) Σ ‖z − C̄_y‖²/2 over samples of known classes has the gradient λ (z − C̄_y)/5 at z."""
    z = INPUTS @ body.T
    return (strength * (z - MEANS[TARGETS]) * KNOWN[TARGETS, None] / 5).T @ INPUTS


def sums(body: np.ndarray) -> np.ndarray:
    return TRUTH.T @ (INPUTS @ body.T)


def test_fedproto_trains_towards_prototypes_and_sends_sums() -> None:
    rule, model = fedproto(TRAINING, pull=0.8).client, other(1)
    data = full_batches({"local": 2, "look": 1})
    state, up = rule.update(PROBLEM, Prototypes({}, CLASSES), Personal(model), data)
    body, weight, bias = arrays(model)
    for _ in range(2):
        slope = slopes(body, weight, bias)
        body, weight, bias = (
            body - LR * (slope["0.weight"] + pulled(body, 0.8)),
            weight - LR * slope["1.weight"],
            bias - LR * slope["1.bias"],
        )
    near(state.model["0.weight"], body)
    near(state.model["1.weight"], weight)
    near(state.model["1.bias"], bias)
    near(up.classes.total, sums(body))
    near(up.classes.samples, np.array([1.0, 1.0, 3.0, 0.0]))


def test_prototypes_are_means_over_all_samples_of_a_class() -> None:
    """Class 0: (1·[1, 0] + 3·[3, 2])/4, whatever the clients weigh; class 1 stays; class 2 is nobody's."""
    algorithm = fedproto(TRAINING)
    server = algorithm.server.init(PROBLEM, other(1), 2.0)
    old = torch.tensor([[0.0, 0.0], [5.0, 6.0], [0.0, 0.0], [0.0, 0.0]]).double()
    server = server._replace(classes=ClassMeans(old, torch.tensor([0.0, 1.0, 0.0, 0.0]).double()))
    counts = [torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([3.0, 0.0, 0.0, 0.0])]
    totals = [torch.tensor([[1.0, 0.0]] + [[0.0, 0.0]] * 3), torch.tensor([[9.0, 6.0]] + [[0.0, 0.0]] * 3)]
    ups = [Told(ClassSums(t.double(), c.double()), NONE) for t, c in zip(totals, counts, strict=True)]
    weights = algorithm.server.weigh(PROBLEM, np.array([1.0, 3.0]))
    assert weights.tolist() == [1.0, 1.0]
    found = algorithm.server.broadcast(
        algorithm.server.update(server, reduce(tree.stack(ups), torch.from_numpy(weights)), 0)
    ).classes
    near(found.means, np.array([[2.5, 1.5], [5.0, 6.0], [0.0, 0.0], [0.0, 0.0]]))
    assert found.known.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_mixed_prototypes_are_those_of_the_servers_that_know_a_class() -> None:
    one = ClassMeans(torch.tensor([[2.0], [4.0]]), torch.tensor([1.0, 1.0]))
    two = ClassMeans(torch.tensor([[0.0], [8.0]]), torch.tensor([0.0, 1.0]))
    found = ClassMeans(*(0.5 * (a + b) for a, b in zip(one, two, strict=True))).settled()
    assert found.means.tolist() == [[2.0], [6.0]]
    assert found.known.tolist() == [1.0, 1.0]


def test_fedpac_trains_the_head_then_the_body_towards_centroids() -> None:
    rule, model = fedpac(TRAINING, pull=0.8, head_lr=0.7).client, other(1)
    head = {name: model[name] for name in ("1.weight", "1.bias")}
    body: Params = {"0.weight": model["0.weight"]}
    data = full_batches({"personal": 1, "local": 2, "look": 1})
    state, up = rule.update(PROBLEM, Aligned(body, {}, CLASSES), Own(head), data)
    theta, weight, bias = arrays(model)
    slope = slopes(theta, weight, bias)
    weight, bias = weight - 0.7 * slope["1.weight"], bias - 0.7 * slope["1.bias"]
    for _ in range(2):
        theta = theta - LR * (slopes(theta, weight, bias)["0.weight"] + pulled(theta, 0.8))
    near(state.personal["1.weight"], weight)
    near(state.personal["1.bias"], bias)
    near(model["0.weight"] + up.change["0.weight"], theta)
    near(up.classes.total, sums(theta))


def test_fedpac_averages_bodies_and_centroids() -> None:
    algorithm, model = fedpac(TRAINING), other(1)
    server = algorithm.server.init(PROBLEM, model, 2.0)
    ups = [
        Felt(
            {"0.weight": torch.full((2, 3), float(value)).double()},
            ClassSums(torch.full((4, 2), float(value)).double(), torch.tensor([float(value), 1.0, 0.0, 0.0]).double()),
            NONE,
        )
        for value in (1, 4)
    ]
    down = algorithm.server.broadcast(
        algorithm.server.update(server, reduce(tree.stack(ups), torch.tensor([2.0, 1.0])), 0)
    )
    near(down.shared["0.weight"], arrays(model)[0] + 2.0)
    near(down.classes.means, np.array([[1.0, 1.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]))
    assert down.classes.known.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_the_loss_of_a_round_has_the_distance_in_it() -> None:
    rule, model = fedproto(TRAINING, pull=0.8).client, other(1)
    up = rule.update(PROBLEM, Prototypes({}, CLASSES), Personal(model), full_batches({"local": 1, "look": 1}))[1]
    body, weight, bias = arrays(model)
    z = INPUTS @ body.T
    chances = (softmax(z @ weight.T + bias) * TRUTH).sum(1)
    apart = ((z - MEANS[TARGETS]) ** 2).mean(1) * KNOWN[TARGETS]
    near(up.loss, (-np.log(chances) + 0.8 * apart).mean())
