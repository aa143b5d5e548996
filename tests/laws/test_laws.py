"""Every registered method keeps every law."""

import itertools

import pytest

from personafl.algorithms import METHODS, Training
from personafl.core.algorithm import Algorithm
from personafl.core.batches import Steps
from personafl.core.optim import Adaptive, Sgd
from personafl.core.schedule import Linear
from personafl.errors import BadInput
from personafl.fast import gradient
from personafl.fast import training as training_
from personafl.testing import LAWS, TOLERANCE, close, everything, make_case
from tiers import HEART, tiered

BY_OPTIMIZER = ("stacked_equals_one_by_one", "padding_is_inert")  # the others are about messages and states
TRAININGS = {
    "sgd": Training(work=Steps(epochs=2, batch=4), optimizer=Sgd(lr=0.1, momentum=0.9, weight_decay=1e-3, clip=1.0)),
    "adam-steps": Training(work=Steps(steps=3, batch=5), optimizer=Adaptive(lr=0.01)),
    "bare": Training(work=Steps(epochs=3, batch=4), optimizer=Sgd(lr=0.1)),
    "plain": Training(work=Steps(epochs=2, batch=4), optimizer=Sgd(lr=0.1, weight_decay=1e-3)),
}
SCHEDULE = Linear(rounds=4, warmup=0.5)
FULL = Sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3, clip=1.0, schedule=SCHEDULE)
SCHEDULED = {
    "full": Training(work=Steps(steps=3, batch=4), optimizer=FULL),  # no client waits: steps are in place
    "decay": Training(work=Steps(epochs=2, batch=4), optimizer=Sgd(lr=0.1, weight_decay=1e-3, schedule=SCHEDULE)),
}


def build(method: str, training: Training) -> Algorithm | BadInput:
    try:
        return METHODS[method].build(training)
    except BadInput as refusal:
        return refusal


def taken(trainings: dict[str, Training]) -> list[tuple[str, str]]:
    """Return the methods with the trainings that they do not refuse, in order."""
    pairs = itertools.product(METHODS, trainings)
    return [(method, name) for method, name in pairs if isinstance(build(method, trainings[name]), Algorithm)]


def first_of(pairs: list[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return each method with the first of its trainings."""
    return {(method, next(name for each, name in pairs if each == method)) for method in dict(pairs)}


LAWFUL, SCHEDULABLE = taken(TRAININGS), taken(SCHEDULED)


@pytest.mark.parametrize(
    ("method", "training"), tiered(LAWFUL, {*first_of(LAWFUL), *(pair for pair in LAWFUL if pair[1] == "adam-steps")})
)
def test_laws(method: str, training: str) -> None:
    """All of them with the first training that the method takes, on one case: they share what was trained for it."""
    algorithm = build(method, TRAININGS[training])
    assert isinstance(algorithm, Algorithm)
    case = make_case(algorithm)
    for law in LAWS if (method, training) in first_of(LAWFUL) else BY_OPTIMIZER:
        LAWS[law](case)


@pytest.mark.parametrize("method", METHODS)
def test_no_method_refuses_plain_sgd(method: str) -> None:
    """A method that refused every training would be held to no law."""
    assert isinstance(build(method, TRAININGS["plain"]), Algorithm)


@pytest.mark.parametrize(
    ("method", "training"), tiered(SCHEDULABLE, {pair for pair in first_of(SCHEDULABLE) if pair[0] in HEART})
)
def test_stacked_with_rates_as_a_gpu_has_them(method: str, training: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a rate stays a tensor, so that nobody waits for it. Every operation has to stack: torch warns of one that
    does not, which fails a test, and runs it in a loop.
    """
    algorithm = build(method, SCHEDULED[training])
    assert isinstance(algorithm, Algorithm)
    case, outcomes = make_case(algorithm), []
    for strategy in ("sequential", "stacked"):
        with case.simulation(strategy) as simulation:
            for number in range(2):
                simulation.step(number)
            outcomes.append(everything(simulation))
        for module in (gradient, training_):
            monkeypatch.setattr(module, "number", lambda factor: factor)
    close(*outcomes, TOLERANCE)
