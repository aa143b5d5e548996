"""Which method validation data alone would pick, and how far from the best on test data it is.

Who needs a model has no test data: of several methods she takes the one whose model has the best mean accuracy over
seen clients and seeds on validation data, the first of equals. With v and t the means on validation and test data,

    p = argmax_m v_m,   b = argmax_m t_m,   behind = t_b - t_p ≥ 0,

and the same under each seed alone, for most people have one. A method drawn at random is Σ_m (t_b - t_m) / M behind.
Only methods that have both scores under every seed take part: means over different seeds are of different clients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from personafl.errors import BadInput
from personafl.evaluate.paired import Paired
from personafl.report.cells import cells
from personafl.report.figure import Figure, View
from personafl.report.findings import Labelled, Scored, scored
from personafl.report.measure import ACCURACY

TITLES = ("seed", "picked", "its\nvalidation", "its\ntest", "best on test", "its\ntest", "points\nbehind")
CAPTION = (
    "Picked: the method whose model has the best mean score over seen clients on validation data. Behind: how far it "
    "is below the method that is best on test data, which nobody knows beforehand."
)
_LEVEL = 1e-9  # scores that differ by less are equal: means of the same counts, in another order


@dataclass(frozen=True, kw_only=True)
class Pick:
    """What one seed, or all of them together (None), pick; scores are means over seen clients, and over seeds."""

    seed: int | None
    method: str
    model: str  # global, personal or tuned: that which the method is about
    validation: float
    test: float
    level: tuple[str, ...]  # other methods that are as good on validation data
    best: str  # on test data; the picked one, if none is better
    best_model: str
    best_test: float

    @property
    def behind(self) -> float:
        """How far the picked method is below the best one on test data."""
        return self.best_test - self.test


@dataclass(frozen=True, kw_only=True)
class Picked:
    """What was picked by validation data: by all seeds, and by each alone."""

    whole: Pick
    seeds: tuple[Pick, ...]
    methods: tuple[str, ...]  # that there were to pick from
    left_out: tuple[str, ...]  # without both scores under every seed
    at_random: float  # how far a method drawn at random is behind
    pair: Paired | None  # the best less the picked, in points, over clients and seeds; None: it is the best itself

    def __str__(self) -> str:
        one = self.whole
        level = f" (level there with {', '.join(one.level)})" if one.level else ""
        scores = f"{_percent(one.validation)} % there{level} and {_percent(one.test)} % on test data"
        said = f"Picked by validation data: {one.method} ({one.model}), {scores}, {self._standing()}."
        if self.left_out:
            said += f" Not in it, without scores under every seed: {', '.join(self.left_out)}."
        if len(self.seeds) > 1:
            often = Counter(pick.method for pick in self.seeds).most_common()
            behind = [pick.behind for pick in self.seeds]
            each = ", ".join(f"{name} by {count}" for name, count in often)
            far = f"{_percent(float(np.mean(behind)))} points behind on average, {_percent(max(behind))} at most"
            said += f" By single seeds, of {len(self.seeds)}: {each}; {far}."
        return said

    def _standing(self) -> str:
        one, of = self.whole, f"the {len(self.methods)} methods"
        if self.pair is None:
            return f"where none of {of} is better"
        change = ACCURACY.change(self.pair.mean, self.pair.half).removeprefix("+")
        drawn = f"a method drawn at random is {_percent(self.at_random)} behind"
        best = f"the best of {of} there, {one.best} ({one.best_model}), has {_percent(one.best_test)} %"
        return f"{change} points (95%) behind: {best}; {drawn}"

    def facts(self) -> dict[str, Any]:
        """Return it as JSON has it; scores as in rows, points behind as shares."""
        half = None if self.pair is None or math.isnan(self.pair.half) else self.pair.half / ACCURACY.scale
        return {
            **_facts(self.whole),
            "behind_half": half,
            "behind_at_random": self.at_random,
            "methods": list(self.methods),
            "left_out": list(self.left_out),
            "seeds": [_facts(pick) for pick in self.seeds],
            "words": str(self),
        }

    def lines(self) -> Iterator[tuple[str, ...]]:
        """Yield the cells under TITLES: a line for each seed, and one for all if there are several."""
        for pick in (*self.seeds, *([self.whole] if len(self.seeds) > 1 else [])):
            name = "all" if pick.seed is None else str(pick.seed)
            scores = _percent(pick.validation), _percent(pick.test)
            best = f"{pick.best} ({pick.best_model})"
            yield name, f"{pick.method} ({pick.model})", *scores, best, _percent(pick.best_test), _percent(pick.behind)


def pick(results: Sequence[Labelled]) -> Picked:
    """Return which method validation data pick, and what it is worth; fail if there is nothing to pick from or by."""
    on = {split: scored(results, split=split) for split in ("validation", "test")}
    seeds = sorted({result.rows[0]["seed"] for _, result in results if result.rows})
    labels = list(dict.fromkeys(label for label, _ in results))
    whole = [name for name in labels if all(name in on[s] and len(on[s][name].values) == len(seeds) for s in on)]
    if not on["validation"]:
        raise BadInput("pick: there are no scores on validation data; compare with data.validation=0.2")
    if not on["test"]:
        raise BadInput("pick: the test data were left unread; compare with evaluation.split=test")
    if len(whole) < 2:
        have = f"{whole[0]} alone has" if whole else f"none of {', '.join(labels)} has"
        raise BadInput(f"pick: {have} scores under every seed; two methods are needed to pick from")
    validation, test = ({name: on[split][name] for name in whole} for split in on)
    chosen = _pick(validation, test, None)
    others = [chosen.best_test - own.mean for own in test.values()]
    return Picked(
        whole=chosen,
        seeds=tuple(_pick(validation, test, seed) for seed in seeds),
        methods=tuple(whole),
        left_out=tuple(name for name in labels if name not in whole),
        at_random=float(np.mean(others)),
        pair=None if chosen.best == chosen.method else test[chosen.best].against(test[chosen.method]),
    )


def _pick(validation: dict[str, Scored], test: dict[str, Scored], seed: int | None) -> Pick:
    """Return the pick by one seed, or by all; methods are in the order of the comparison, which decides ties."""

    def score(own: Scored) -> float:
        return own.mean if seed is None else float(np.nanmean(own.values[seed]))

    by, reached = ({name: score(own) for name, own in part.items()} for part in (validation, test))
    first, *level = [name for name, value in by.items() if value >= max(by.values()) - _LEVEL]
    best = next(name for name, value in reached.items() if value >= max(reached.values()) - _LEVEL)
    best = first if reached[first] >= reached[best] - _LEVEL else best
    return Pick(
        seed=seed,
        method=first,
        model=test[first].model,
        validation=by[first],
        test=reached[first],
        level=tuple(level),
        best=best,
        best_model=test[best].model,
        best_test=reached[best],
    )


def picked_in(results: Sequence[Labelled]) -> Picked | None:
    """Return what was picked; None where there is nothing to pick from yet, as while runs are on or after failures."""
    try:
        return pick(results)
    except BadInput:
        return None


def pick_figures(results: Sequence[Labelled]) -> list[Figure]:
    """Return the figure of what was picked, for the page; none while there is nothing to pick from."""
    if (picked := picked_in(results)) is None:
        return []
    view = View(chosen={}, picture=cells("Picked by validation data", TITLES, list(picked.lines())))
    return [Figure(title="The method that validation data pick", caption=f"{picked} {CAPTION}", views=[view])]


def _facts(one: Pick) -> dict[str, Any]:
    named = {key: getattr(one, key) for key in ("method", "model", "validation", "test", "best", "best_model")}
    seed = {} if one.seed is None else {"seed": one.seed}
    return {**seed, **named, "best_test": one.best_test, "behind": one.behind, "level": list(one.level)}


def _percent(value: float) -> str:
    return f"{ACCURACY.scale * value:.{ACCURACY.digits}f}"
