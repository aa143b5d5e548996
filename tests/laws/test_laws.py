"""Every registered method keeps every law."""

import pytest

from personafl.algorithms import METHODS, Training
from personafl.core.batches import Steps
from personafl.core.optim import Adaptive, Sgd
from personafl.testing import LAWS, make_case

TRAININGS = {
    "sgd": Training(work=Steps(epochs=2, batch=4), optimizer=Sgd(lr=0.1, momentum=0.9, weight_decay=1e-3, clip=1.0)),
    "adam-steps": Training(work=Steps(steps=3, batch=5), optimizer=Adaptive(lr=0.01)),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("method", METHODS)
def test_law(method: str, training: str, law: str) -> None:
    LAWS[law](make_case(METHODS[method].build(TRAININGS[training])))
