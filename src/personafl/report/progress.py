"""How far runs are, by their directories: what `personafl watch` shows."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from personafl.report.load import Run, Source, Values

RECENT = 20  # rounds by which the speed is reckoned


@dataclass(frozen=True, kw_only=True)
class State:
    """Where a run stands; `left` are the seconds that its rounds will still take, if there is anything to tell by."""

    name: str
    done: int
    rounds: int
    finished: bool
    failed: str = ""  # how; empty: it did not
    loss: float | None
    accuracy: float | None  # of the last scoring: personal if the method has one, else global
    speed: float | None  # clients trained in a second
    left: float | None

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.finished or bool(self.failed)


def states(sources: Sequence[Source]) -> list[State]:
    """Return where each run stands; those that have not begun are reckoned by the others."""
    runs = [run for source in sources for run in source.runs]
    return [_state(run, runs) for run in runs]


def overall(parts: Sequence[State]) -> float | None:
    """Return the seconds that are left of all runs together, which go one after the other."""
    waiting = [part.left for part in parts if not part.over]
    known = [left for left in waiting if left is not None]
    return sum(known) if waiting and len(known) == len(waiting) else None


def changed_at(sources: Sequence[Source]) -> float:
    """Return when anything was written last, in seconds since 1970."""
    files = (run.path / name for source in sources for run in source.runs for name in ("metrics.jsonl", "result.json"))
    return max((path.stat().st_mtime for path in files if path.exists()), default=time.time())


def _state(run: Run, runs: Sequence[Run]) -> State:
    trained = run.trained
    done = trained[-1]["number"] + 1 if trained else 0
    recent = trained[-RECENT:]
    spent = sum(entry["seconds"] for entry in recent)
    each = spent / len(recent) if recent else _expected(run, runs)
    finished = run.result is not None
    return State(
        name=f"{run.label} seed {run.seed}",
        done=done,
        rounds=run.rounds,
        finished=finished,
        failed="" if run.failure is None else "diverged" if run.failure.diverged else "failed",
        loss=trained[-1]["loss"] if trained else None,
        accuracy=_accuracy(run),
        speed=sum(entry["clients"] for entry in recent) / spent if spent else None,
        left=0.0 if finished else None if each is None else each * (run.rounds - done),
    )


def _expected(run: Run, runs: Sequence[Run]) -> float | None:
    """Return the seconds of a round of a run that has not begun: as its method has under other seeds, or else all."""
    alike = [entry["seconds"] for other in runs if other.label == run.label for entry in other.trained]
    known = alike or [entry["seconds"] for other in runs for entry in other.trained]
    return statistics.mean(known) if known else None


def _accuracy(run: Run) -> float | None:
    """Return the last accuracy of seen clients on test data."""
    found = {row["model"]: row["accuracy"] for row in _scored(run)}
    return next((found[model] for model in ("tuned", "personal", "global") if model in found), None)


def _scored(run: Run) -> Iterator[Values]:
    wanted = {"clients": "seen", "split": "test"}
    yield from (row for row in (*run.events("score"), *run.rows) if wanted.items() <= row.items())
