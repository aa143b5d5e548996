"""How a score is called and written, in one place: the sentence, differences and groups ask for nothing else."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A score of a client: its name in columns, by what it is multiplied when shown, and which way is better."""

    key: str
    title: str
    unit: str  # of a difference
    scale: float = 1.0
    digits: int = 1
    larger_is_better: bool = True

    def gain(self, difference: float) -> float:
        """Return how much better a score is that is larger by so much, as shown."""
        return self.scale * (difference if self.larger_is_better else -difference)

    def written(self, value: float, spread: float | None = None) -> str:
        """Return a score in words, and what it may be off by."""
        return f"{self.scale * value:.{self.digits}f}{'' if spread is None else self.within(self.scale * spread)}"

    def change(self, gain: float, half: float = math.nan) -> str:
        """Return a gain with its sign, and half of its interval if that is known."""
        sign = "" if round(gain, self.digits) == 0 else "+" if gain > 0 else "−"
        return f"{sign}{abs(gain):.{self.digits}f}{'' if math.isnan(half) else self.within(half)}"

    def within(self, half: float) -> str:
        """Return what stands behind a number that may be off by so much."""
        return f" ± {half:.{self.digits}f}"


ACCURACY = Measure(key="accuracy", title="accuracy in %", unit="points", scale=100.0)


_WORDS = {"accuracy": "accuracy", "r2": "R²", "f1": "F1"}


def score_word(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return what the score of rows is called: accuracy, or what a task without classes has in its place."""
    return _WORDS[next((row["score"] for row in rows if "score" in row), "accuracy")]


def metric_names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the further metrics that rows have, each with its weighted mean."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [key for key in keys if f"{key}_weighted" in keys and key not in ("accuracy", "word_error")]


def share(part: float) -> str:
    """Return a share of clients in words."""
    return f"{part:.0%}"
