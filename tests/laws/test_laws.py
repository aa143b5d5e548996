"""Every registered method keeps every law."""

import pytest

from personafl.algorithms import METHODS, Training
from personafl.core.algorithm import Algorithm
from personafl.core.batches import Steps
from personafl.core.optim import Adaptive, Sgd
from personafl.errors import BadInput
from personafl.testing import LAWS, make_case

TRAININGS = {
    "sgd": Training(work=Steps(epochs=2, batch=4), optimizer=Sgd(lr=0.1, momentum=0.9, weight_decay=1e-3, clip=1.0)),
    "adam-steps": Training(work=Steps(steps=3, batch=5), optimizer=Adaptive(lr=0.01)),
    "bare": Training(work=Steps(epochs=3, batch=4), optimizer=Sgd(lr=0.1)),
    "plain": Training(work=Steps(epochs=2, batch=4), optimizer=Sgd(lr=0.1, weight_decay=1e-3)),
}


def build(method: str, training: str) -> Algorithm | BadInput:
    try:
        return METHODS[method].build(TRAININGS[training])
    except BadInput as refusal:
        return refusal


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("method", METHODS)
def test_law(method: str, training: str, law: str) -> None:
    algorithm = build(method, training)
    if isinstance(algorithm, BadInput):
        pytest.skip(f"{method} refuses this training: {algorithm}")
    LAWS[law](make_case(algorithm))


@pytest.mark.parametrize("method", METHODS)
def test_no_method_refuses_plain_sgd(method: str) -> None:
    """A method that refused every training would be held to no law."""
    assert isinstance(build(method, "plain"), Algorithm)
