"""What was found: every method's model against the others', paired over clients and seeds: the best, and who is behind.

A method's model is its last personal one, or the global one if it has none: that whose worst decile the table shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from personafl.evaluate.paired import Paired, Rows, Values, paired
from personafl.report.measure import ACCURACY, Measure, share
from personafl.report.table import last_models, main_split
from personafl.runs.result import Result

Labelled = tuple[str, Result]  # a run's result, and the label that it is shown under
BASELINES = ("fedavg", "local")  # the best method is compared with the first of them that there is
POINT = 1.0  # of the score: what may be lost before it is said


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The scores of a method's model by seed, of its seen clients in order; NaN where a client has none."""

    label: str
    model: str
    values: Mapping[int, Values]
    clients: Mapping[int, Rows]  # a number for each, the same under all seeds
    results: Mapping[int, Result]
    measure: Measure

    @property
    def name(self) -> str:
        """The method, and which of its models it is."""
        return f"{self.label} ({self.model})"

    @property
    def mean(self) -> float:
        """The mean over seeds of the mean over clients."""
        return float(np.mean([np.nanmean(values) for values in self.values.values()]))

    def against(self, other: Scored) -> Paired | None:
        """Return how much better it is than another, as it is shown; None if no client of a seed has both."""
        seeds = [s for s, own in self.values.items() if s in other.values and len(own) == len(other.values[s])]
        gains = [self.measure.gain(1.0) * (self.values[seed] - other.values[seed]) for seed in seeds]
        return paired(gains, [self.clients[seed] for seed in seeds])

    def column(self, seed: int, key: str) -> list[Any]:
        """Return what is known of its clients under a seed, in the order of their values; nothing if that is not."""
        return _seen(self.results[seed], key)


def scored(
    results: Sequence[Labelled], model: str | None = None, measure: Measure = ACCURACY, split: str | None = None
) -> dict[str, Scored]:
    """Return by label the scores of each method's model, or of the one that is named; the best first."""
    split = split or main_split([row for _, result in results for row in result.rows])
    people: dict[str, int] = {}
    found = []
    for label in dict.fromkeys(label for label, _ in results):
        own = {result.rows[0]["seed"]: result for name, result in results if name == label and result.rows}
        last = last_models([row for result in own.values() for row in result.rows if row["split"] == split])
        which = model or (last[0]["model"] if last else "global")
        column = f"{which}_{split}_{measure.key}"
        values = {seed: np.array(_seen(result, column), dtype=np.float64) for seed, result in own.items()}
        values = {seed: part for seed, part in values.items() if np.isfinite(part).any()}  # None is NaN there
        names = {seed: _seen(own[seed], "name") for seed in values}
        clients = {s: np.array([people.setdefault(n, len(people)) for n in part]) for s, part in names.items()}
        if values:
            one = Scored(label=label, model=which, values=values, clients=clients, results=own, measure=measure)
            found.append(one)
    return {one.label: one for one in sorted(found, key=lambda one: -measure.gain(one.mean))}


def _seen(result: Result, column: str) -> list[Any]:
    """Return a column's values of seen clients; nothing if there is no such column."""
    pairs = zip(result.columns.get(column, ()), result.columns["clients"], strict=False)
    return [value for value, which in pairs if which == "seen"]


def rival_of(best: str, methods: Sequence[str]) -> str:
    """Return with whom the best of several methods, in their order, is compared."""
    return next((name for name in BASELINES if name in methods and name != best), methods[1])


def sentence(results: Sequence[Labelled]) -> str:
    """Say who is best and by how much; of one method, whether its personal model is better than its global one.

    Empty if there is nothing to compare.
    """
    methods = scored(results)
    if len(methods) > 1:
        ranked = list(methods)
        best, rival = methods[ranked[0]], methods[rival_of(ranked[0], ranked)]
        return _beaten(best, rival, best.against(rival))
    for own in methods.values():
        shared = scored(results, "global").get(own.label)
        if own.model != "global" and shared is not None and (pair := own.against(shared)) is not None:
            return f"{told(own.name, shared.name, pair, own.measure)}; {share(pair.worse)} of clients are hurt."
    return ""


def _beaten(best: Scored, rival: Scored, pair: Paired | None) -> str:
    if pair is None:
        return ""
    if pair.mean < 0:  # in the seeds that both have
        return _beaten(rival, best, -pair)
    worse = f"{share(pair.worse)} of clients are worse off with {best.label}"
    return f"{told(best.name, rival.name, pair, best.measure)}; {worse}."


def told(one: str, other: str, pair: Paired, measure: Measure) -> str:
    """Say which of two is better, or that nobody can say so."""
    if pair.mean < 0:
        one, other, pair = other, one, -pair
    over = "clients and seeds" if pair.seeds > 1 else "clients"
    by = f"{measure.change(pair.mean, pair.half).removeprefix('+')} {measure.unit}"
    if math.isnan(pair.half):
        return f"{one} is {by} above {other}, for a single client"
    if pair.told_apart:
        return f"{one} beats {other} by {by} (95%), paired over {over}"
    return f"{one} and {other} cannot be told apart: {by} (95%), paired over {over}"


def behind(results: Sequence[Labelled]) -> list[str]:
    """Say which methods' own models are worse than the better of FedAvg and local training, and what to do about it.

    Where neither was run, the method's global model is in their place. Only what is told apart, and is a point or more.
    """
    methods, shared = scored(results), scored(results, "global")
    baselines = [own for label, own in methods.items() if label in BASELINES]  # the better one first
    found = []
    for label, own in methods.items():
        rival = next(iter(baselines), shared.get(label))
        if own.model == "global" or label in BASELINES or rival is None:
            continue
        pair = own.against(rival)
        if pair is not None and pair.told_apart and pair.mean <= -POINT:
            lost = own.measure.change(-pair.mean, pair.half).removeprefix("+")
            where = f"{lost} {own.measure.unit} below {rival.name}, and worse for {share(pair.worse)} of clients"
            remedy = _remedy(own, rival, shared.get(label), results)
            found.append(f"{label}: clients' own models are {where}{_had(own)}; {remedy}")
    return found


def _had(own: Scored) -> str:
    """Say how many samples the clients trained on, where that is known."""
    sizes = [size for seed in own.values for size in own.column(seed, "train")]
    return f", who have {np.median(sizes):,.0f} training samples in the median" if sizes else ""


def _remedy(own: Scored, rival: Scored, shared: Scored | None, results: Sequence[Labelled]) -> str:
    """Say what gives clients a model that is not behind: the choice where that helps, else another method."""
    split = main_split([row for _, result in results for row in result.rows])
    wanted = {"model": "chosen", "clients": "seen", "split": split}
    rows = [row for result in own.results.values() for row in result.rows if wanted.items() <= row.items()]
    mean = float(np.mean([row["accuracy"] for row in rows])) if rows else -math.inf
    if own.measure.gain(mean - rival.mean) > -POINT:
        return f"the models chosen by validation data have {own.measure.written(mean)} %: keep those"
    if not rows and shared is not None and shared.mean > own.mean:
        return "with data.validation=0.2 each client keeps its own model only where that is shown to be better"
    return f"take {rival.label}, or tune the method by validation data (personafl compare --tune 12)"
