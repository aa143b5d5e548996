"""Every client's choice between the shared model and its own."""

import numpy as np

from personafl.evaluate.score import Scores
from personafl.runs.result import choose

NAN = float("nan")


def scores(accuracy: list[float], loss: list[float]) -> Scores:
    samples = np.where(np.isnan(accuracy), 0, 10)
    return Scores(np.array(accuracy), np.array(loss), samples)


def test_choice_is_by_validation_and_scored_on_test() -> None:
    """Clients: personal better; global better; tie, personal has less loss; tie, global has; full tie; no validation.

    On test the choice is right for the first and wrong for the second: test data have no say.
    """
    scored = {
        ("seen", "global", "validation"): scores([0.5, 0.9, 0.7, 0.7, 0.7, NAN], [1.0, 1.0, 2.0, 1.0, 1.0, NAN]),
        ("seen", "personal", "validation"): scores([0.8, 0.8, 0.7, 0.7, 0.7, NAN], [9.0, 0.1, 1.0, 2.0, 1.0, NAN]),
        ("seen", "global", "test"): scores([0.1] * 6, [1.0] * 6),
        ("seen", "personal", "test"): scores([0.2] * 6, [2.0] * 6),
    }
    chosen = choose(scored)
    assert chosen.keys() == {("seen", "chosen", "test")}
    result = chosen["seen", "chosen", "test"]
    assert result.accuracy.tolist() == [0.2, 0.1, 0.2, 0.1, 0.1, 0.1]
    assert result.loss.tolist() == [2.0, 1.0, 2.0, 1.0, 1.0, 1.0]
    assert result.samples.tolist() == [10] * 6


def test_there_is_no_choice_without_two_models_and_validation_data() -> None:
    one = scores([0.5], [1.0])
    assert choose({("seen", "global", "test"): one, ("seen", "global", "validation"): one}) == {}
    assert choose({("seen", "personal", "test"): one, ("seen", "personal", "validation"): one}) == {}
    assert choose({("seen", "global", "test"): one, ("seen", "personal", "test"): one}) == {}


def test_seen_and_unseen_choose_apart() -> None:
    low, high = scores([0.1], [1.0]), scores([0.9], [1.0])
    scored = {
        (clients, model, split): high if (model == "personal") == (clients == "seen") else low
        for clients in ("seen", "unseen")
        for model in ("global", "personal")
        for split in ("test", "validation")
    }
    chosen = choose(scored)
    assert chosen["seen", "chosen", "test"].accuracy == 0.9
    assert chosen["unseen", "chosen", "test"].accuracy == 0.9
