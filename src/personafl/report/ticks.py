"""Axes: round numbers to mark, how to write them, and where values lie."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

NICE = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Axis:
    """A range of values, which may be logarithmic, and the values marked on it, in ascending order."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies: 0 at the low end, 1 at the high one."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    @property
    def labels(self) -> tuple[str, ...]:
        """The ticks in words, exactly, each with as few decimals as that takes."""
        return tuple(map(_label, self.ticks))


def linear_axis(values: Sequence[float], most: int = 8) -> Axis:
    """Return an axis a little wider than the values, but not for that across 0; steps are 1, 2, 2.5 or 5 · 10^k."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value, but for rounding
        low, high = (low - abs(low) / 10, high + abs(high) / 10) if low else (0.0, 1.0)
    margin = 0.03 * (high - low)
    low = low - margin if low < 0 else max(low - margin, 0.0)
    high = high + margin if high > 0 else min(high + margin, 0.0)
    if 0 < low < 0.2 * (high - low):
        low = 0.0  # so near that to leave it out would mislead
    return Axis(low, high, _ticks(low, high, most))


def _ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    """Return the multiples of the smallest nice step in a range, of which there are at most so many."""
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (factor * size for factor in NICE):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            break
    return tuple(_rounded(number * step) for number in range(first, last + 1))


def log_axis(values: Sequence[float], most: int = 9) -> Axis:
    """Return a logarithmic axis a little wider than the values, which must be above 0; ticks are 1, 2 or 5 · 10^k."""
    low, high = min(values), max(values)
    margin = max((high / low) ** 0.03, 1.02)
    low, high = low / margin, high * margin
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        ticks = [_rounded(factor * 10.0**power) for power in decades for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= most:
            break
    if len(ticks) < 2:  # less than a decade between them
        ticks = list(_ticks(low, high, most))
    return Axis(low, high, tuple(ticks[:: -(-len(ticks) // most)]), log=True)


def _rounded(value: float) -> float:
    return float(f"{value:.12g}")


def _label(value: float) -> str:
    if value and not 1e-4 <= abs(value) < 1e10:
        text = f"{value:g}".replace("e+", "e").replace("e-0", "e-")
    else:
        decimals = next((n for n in range(10) if round(value, n) == value), 10)
        text = f"{value:,.{decimals}f}"
    return text.replace("-", "−")
