"""What looks wrong while a run is on: a loss that rises or is absurd, models that guess, scores that are no numbers.

Each is said once. The rules are blunt, so that they are silent where training works, however slowly.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from personafl.core.split import listed
from personafl.data.federated import Clients, FederatedData
from personafl.evaluate.score import Scores

_ROUNDS = 5  # that must agree, for cohorts differ
_FAR = 2.0  # times as much: of the best loss so far, or of that of guessing
_BY_FAR = 4.0  # times less than guessing: a training loss that says that training works
_REMEDY = "lower training.lr, set training.clip, or standardise the inputs (data.normalize)"
_BY_HEART = "training data are learned by heart: train fewer rounds, set training.weight_decay, or take a smaller model"
_NEARLY_ALL = 0.95  # of samples have one label: hardly anything is better than that answer
_RARE = 'nearly all have one label: see training.class_weights = "balanced", and metrics of your own'
_LEARN = "train longer, try another training.lr, or standardise the inputs (data.normalize)"
Split = Literal["test", "validation"]
_SPLITS: tuple[Split, ...] = ("test", "validation")  # on which models are judged

Alarm = tuple[str, str]  # what is wrong, as said once; the line


class Alarms:
    """Watches the losses of rounds and the scores of models; `past` are the metrics of rounds that are done.

    Where a part of the network is each client's own, the global model has that part untrained, and is none to judge.
    """

    def __init__(self, data: FederatedData, split: bool, rounds: int, past: Iterable[Mapping[str, Any]]) -> None:
        self._data, self._rounds = data, rounds
        self._models = ("personal", "tuned") if split else ("global", "personal", "tuned")
        self._guess = _guessing(data)
        self._losses: list[float] = []
        self._said: set[str] = set()
        for entry in past:
            if entry["event"] == "warning":
                self._said.add(entry["kind"])
            elif entry["event"] == "round" and entry["loss"] is not None:
                self._losses.append(entry["loss"])

    def trained(self, number: int, loss: float) -> list[Alarm]:
        """Return what is new after a round: the mean training loss of its clients rises, or is worse than guessing."""
        if not math.isfinite(loss):  # nobody took part
            return []
        self._losses.append(loss)
        return self._new([*self._rising(number), *self._absurd(number)])

    def scored(self, number: int, clients: Clients, scores: Mapping[tuple[str, str], Scores]) -> list[Alarm]:
        """Return what is new after a scoring of clients: losses that are no numbers, models as bad as guessing."""
        found = []
        pairs = [(model, split) for model in self._models for split in _SPLITS]
        for model, split in pairs:
            values = scores.get((model, split))
            if values is None:
                continue
            wrong = clients[(values.samples > 0) & ~np.isfinite(values.loss)]
            if len(wrong):
                names = listed([self._data.client_names[client] for client in wrong])
                found.append(
                    (f"{model} loss", f"{_when(number)} the {model} model has a loss of inf or NaN for {names}")
                )
            if number + 1 >= max(_ROUNDS, self._rounds / 2):
                found += self._at_chance(number, model, values, clients[values.samples > 0], split)
        return self._new(found)

    def _new(self, found: Iterable[Alarm]) -> list[Alarm]:
        new = [alarm for alarm in found if alarm[0] not in self._said]
        self._said |= {kind for kind, _ in new}
        return new

    def _rising(self, number: int) -> Iterator[Alarm]:
        """The last rounds are all worse than twice the best, each half of them more so, and by more than rounding."""
        if len(self._losses) < 2 * _ROUNDS:
            return
        last, before = self._losses[-_ROUNDS:], self._losses[-2 * _ROUNDS : -_ROUNDS]
        best = min(self._losses)
        known = self._guess if math.isfinite(self._guess) else self._losses[0]
        if min(last) > max(_FAR * best, best + known / 4) and np.mean(last) > np.mean(before):
            yield "rising", f"{_when(number)} the training loss rises: {last[-1]:,.4g}, and was {best:,.4g}; {_REMEDY}"

    def _absurd(self, number: int) -> Iterator[Alarm]:
        last = self._losses[-_ROUNDS:]
        if 2 * (number + 1) >= self._rounds and min(last) > _FAR * self._guess:
            guess = f"guessing costs {self._guess:.2f}"
            yield "absurd", f"{_when(number)} the training loss is {last[-1]:,.4g}, and {guess}; {_REMEDY}"

    def _at_chance(self, number: int, model: str, scores: Scores, clients: Clients, split: Split) -> Iterator[Alarm]:
        """No better, on average over clients, than the one label that is best for all of them."""
        data, rows = self._data, self._data.rows(split)
        if data.task == "regression" and len(clients) and np.mean(scores.accuracy[scores.samples > 0]) <= 0:
            what = f"the {model} model is no better than the mean target"
            yield f"{model} chance", f"{_when(number)} {what}; {self._remedy(self._guess)}"
        if data.task != "classification" or data.classes < 2 or not len(clients):
            return
        sizes = rows.sizes_of(clients)
        weights = np.repeat(1 / sizes, sizes) / len(clients)
        labels = data.y[rows.of(clients)].cpu().numpy()
        shares = np.bincount(labels, weights)
        chance = float(shares.max())
        accuracy = float(np.mean(scores.accuracy[scores.samples > 0]))
        if accuracy <= chance:
            guess = -float((shares * np.log(np.maximum(shares, 1e-12))).sum())
            remedy = _RARE if chance > _NEARLY_ALL else self._remedy(guess)
            both = f"{100 * accuracy:.1f}% right, where one answer for all is {100 * chance:.1f}%"
            yield f"{model} chance", f"{_when(number)} the {model} model is at chance level: {both}; {remedy}"

    def _remedy(self, guess: float) -> str:
        """Models that guess either have not learned enough, or so much that it says nothing of other samples."""
        return _BY_HEART if self._losses and self._losses[-1] < guess / _BY_FAR else _LEARN


def _guessing(data: FederatedData) -> float:
    """Return the loss of a model that knows nothing; ∞ where that is not known."""
    if data.task in ("regression", "multilabel"):  # the mean of standardised targets; each label with probability ½
        return 1 / 8 if data.task == "regression" else math.log(2)
    return math.log(data.classes) if data.task != "ctc" and data.classes > 1 else math.inf


def _when(number: int) -> str:
    return f"after round {number + 1}"
