"""Measured times: their distribution, and the files that they are read from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from personafl.errors import BadInput

Reals = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """The distribution of measured times: each of `values`, which ascend, is as likely as any other."""

    values: Reals

    @classmethod
    def of(cls, times: ArrayLike) -> Sample:
        """Return the distribution of times in any order."""
        return cls(np.sort(np.asarray(times, dtype=np.float64), axis=None))

    @property
    def mean(self) -> float:
        """The mean time."""
        return float(self.values.mean())

    def quantile(self, share: ArrayLike) -> Reals:
        """Return the smallest value that at least this share of the values does not exceed."""
        # The tolerance keeps 0.7 · 10 = 7.000…1 at the seventh value.
        place = np.ceil(np.asarray(share, dtype=np.float64) * len(self.values) - 1e-9).astype(np.int64) - 1
        return self.values[np.clip(place, 0, len(self.values) - 1)]


def read_trace(file: str) -> Sample:
    """Read times from a text file, one to a line, or from a .npy file; each must be finite and not negative."""
    path = Path(file)
    try:
        return Sample.of(_from_array(path) if path.suffix == ".npy" else _from_lines(path))
    except OSError as error:
        raise BadInput(f"{file}: cannot read the trace ({error.strerror or error}); check the path") from None


def _from_lines(path: Path) -> list[float]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError:
        raise BadInput(f"{path}: is no text; a trace has one number to a line, or is a .npy file") from None
    return _checked(path, [(f"line {n}", line.strip()) for n, line in enumerate(lines, 1) if line.strip()])


def _from_array(path: Path) -> list[float]:
    try:
        values = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise BadInput(f"{path}: is no .npy file of numbers ({error}); write it with numpy.save") from None
    return _checked(path, [(f"value {n}", value) for n, value in enumerate(np.ravel(values), 1)])


def _checked(path: Path, entries: list[tuple[str, object]]) -> list[float]:
    if not entries:
        raise BadInput(f"{path}: the trace is empty; write one time in seconds to a line")
    times = []
    for place, entry in entries:
        try:
            time = float(entry)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            time = math.nan
        if not (math.isfinite(time) and time >= 0):
            raise BadInput(f"{path}, {place}: {str(entry)!r} is no time in seconds; write a finite number from 0 up")
        times.append(time)
    return times
