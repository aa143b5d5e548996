"""FedBABU by hand, in float64."""

import torch

from head_by_hand import LR, PROBLEM, TRAINING, arrays, full_batches, near, other, slopes
from personafl.algorithms.averaging import Change
from personafl.algorithms.fedalt import Own
from personafl.algorithms.fedbabu import fedbabu
from personafl.core import tree
from personafl.core.algorithm import reduce


def test_the_body_is_trained_under_a_head_that_stays() -> None:
    """Two steps of B ← B − η ∇_B f(B, W, b); W and b are the first ones."""
    rule, model = fedbabu(TRAINING).client, other(1)
    down = rule.expects(PROBLEM, model)
    first = rule.init(PROBLEM, down, torch.Generator())
    state, up = rule.update(PROBLEM, down, first, full_batches({"local": 2}))
    body, weight, bias = arrays(model)
    for _ in range(2):
        body = body - LR * slopes(body, weight, bias)["0.weight"]
    assert set(up.change) == {"0.weight"}
    near(model["0.weight"] + up.change["0.weight"], body)
    assert all(torch.equal(value, model[name]) for name, value in state.personal.items())
    assert rule.models(PROBLEM, down, state).keys() == {"global"}


def test_a_server_averages_bodies_and_sends_one_head() -> None:
    algorithm, model = fedbabu(TRAINING), other(1)
    server = algorithm.server.init(PROBLEM, model, 2.0)
    changes = [{"0.weight": torch.full((2, 3), value, dtype=torch.float64)} for value in (1.0, 4.0)]
    ups = tree.stack([Change(change, torch.zeros(()).double()) for change in changes])
    server = algorithm.server.update(server, reduce(ups, torch.tensor([2.0, 1.0])), 0)
    down = algorithm.server.broadcast(server)
    near(down.shared["0.weight"], arrays(model)[0] + 2.0)  # (2·1 + 1·4)/3
    assert all(torch.equal(value, model[name]) for name, value in down.personal.items())


def test_fine_tuning_trains_the_head_or_everything() -> None:
    model = other(1)
    body, weight, bias = arrays(model)
    for part in ("personal", "all"):
        rule = fedbabu(TRAINING, part=part, tune_lr=0.7).client
        down = rule.expects(PROBLEM, model)
        tuned = rule.personalize(PROBLEM, down, Own(down.personal), full_batches({"tune": 1}))
        slope = slopes(body, weight, bias)
        near(tuned.model["0.weight"], body - (0.7 * slope["0.weight"] if part == "all" else 0.0))
        near(tuned.model["1.weight"], weight - 0.7 * slope["1.weight"])
        near(tuned.model["1.bias"], bias - 0.7 * slope["1.bias"])
