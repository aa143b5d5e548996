"""Noise that clients add: a rule's sum is that of the vectors that are masked, in any order, and it adds none."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from personafl.algorithms import METHODS, Training
from personafl.algorithms.averaging import Averaging, Change
from personafl.core import tree
from personafl.core.optim import Sgd
from personafl.errors import BadInput
from personafl.privacy.distributed import client_key, in_clips, sent
from personafl.privacy.noise import make_key
from personafl.secure.fixed import unwrapped
from personafl.uploads.distributed import SharedNoiseServer, shared
from personafl.uploads.private import private

PROBLEM: Any = None  # the rules under test do not look at it
KEY = make_key(0)
RULE = SharedNoiseServer(
    rule=Averaging(), clip=0.5, noise=1.0, cohort=4.0, key=KEY, mechanism="distributed", clients=4, honest=3
)


def changes(clients: int = 4) -> Change:
    rows = torch.randn(clients, 6, generator=torch.Generator().manual_seed(0))
    return Change({"a": rows[:, :2], "b": rows[:, 2:].reshape(-1, 2, 2)}, torch.arange(1.0, clients + 1))


def start() -> Any:
    return RULE.init(PROBLEM, {"a": torch.zeros(2), "b": torch.zeros(2, 2)}, 4.0)


def test_the_sum_is_that_of_vectors_modulo_two_to_the_32_in_any_order() -> None:
    given, numbers, state = changes(), [7, 3, 9, 12], start()
    single = [tree.map(lambda leaf, row=row: leaf[row], given) for row in range(4)]
    lattice = RULE.lattice(single[0])
    vectors = [
        sent(one, 0.5, lattice, client_key(KEY, number), 5).numpy().astype(np.uint32)
        for one, number in zip(single, numbers, strict=True)
    ]
    summed: Any = in_clips(
        torch.from_numpy(unwrapped(sum(vectors[1:], vectors[0]))), single[0], torch.tensor(0.0), lattice
    )
    together, apart = RULE.join_from(state, None, given, torch.ones(4), np.array(numbers), 5), None
    for row in (2, 0, 3, 1):
        one = tree.map(lambda leaf, row=row: leaf[row : row + 1], given)
        apart = RULE.join_from(state, apart, one, torch.ones(1), np.array(numbers[row : row + 1]), 5)
    assert apart is not None
    for name, leaf in summed.change.items():
        assert leaf.equal(together.total.change[name])
        assert leaf.equal(apart.total.change[name])
    assert float(together.weight) == 4 == together.clients
    assert together.loss() == pytest.approx(2.5)
    other = RULE.join_from(state, None, given, torch.ones(4), np.array(numbers), 6)
    assert not other.total.change["a"].equal(together.total.change["a"])


def test_the_server_divides_by_who_is_in_the_sum_and_adds_nothing() -> None:
    state, given = start(), changes(3)
    uploads = RULE.join_from(state, None, given, torch.ones(3), np.array([0, 1, 2]), 0)
    after = RULE.update(state, uploads, 0)
    for name, leaf in after.own.model.items():
        assert leaf.equal((uploads.total.change[name] * 0.5 / 3).to(torch.float32))
    assert after.clip == 0.5
    assert RULE.told(after) == {"clip": 0.5}
    with pytest.raises(NotImplementedError):
        RULE.join(state, None, given, torch.ones(3))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_methods_whose_server_needs_more_are_refused_by_name(name: str) -> None:
    algorithm = METHODS[name].build(Training(optimizer=Sgd(lr=0.1)))
    how: Any = {"clip": 0.5, "noise": 1.0, "cohort": 4.0, "key": KEY, "mechanism": "distributed"}
    if algorithm.client.uploads._fields == ("loss",):
        assert shared(private(algorithm, **how), 4, 3) is algorithm
    elif algorithm.server.averages:
        made = shared(private(algorithm, **how), 4, 3)
        assert made.server == dataclasses.replace(RULE, rule=algorithm.server)
    else:
        with pytest.raises(BadInput, match=f"what {name}'s clients send"):
            private(algorithm, **how)
