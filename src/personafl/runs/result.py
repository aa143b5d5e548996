"""What a run found: rows that name model × clients × split, and a table with one line per client."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from personafl.core.tasks import task_named
from personafl.evaluate.choice import choose, evidence_of
from personafl.evaluate.score import Scores, picked
from personafl.evaluate.summary import hurt, summarize
from personafl.recipe.devices import device_names
from personafl.recipe.recipe import Recipe
from personafl.runs.private import guarantee
from personafl.runs.samples import ledger
from personafl.runs.scoring import Scored
from personafl.runs.sizes import Size
from personafl.runs.trying import SHARES
from personafl.simulate.federation import Federation
from personafl.storage.csvtext import csv_text
from personafl.storage.files import read_json
from personafl.storage.rundir import Checkpoint
from personafl.system import peak_memory

if TYPE_CHECKING:
    import pandas as pd

Groups = Mapping[str, Mapping[tuple[str, str], Scores]]  # clients -> (model, split) -> per-client scores


# What comes first in a row and in the line of a client.
ROW = ("method", "seed", "model", "clients", "split", "accuracy", "accuracy_weighted", "accuracy_std", "worst_decile")
CLIENT = ("client", "name", "clients", "device", "server", "train", "validation", "test")


@dataclass(frozen=True, repr=False)
class Result:
    """The outcome of a run: `rows`, one per model × clients × split, and `clients`, a table with a line per client."""

    path: Path
    rows: list[dict[str, Any]]
    columns: dict[str, list[Any]]
    peak_memory_mb: float

    def __repr__(self) -> str:
        return f"Result({str(self.path)!r}, rows={len(self.rows)}, clients={len(self.columns['client'])})"

    @property
    def clients(self) -> pd.DataFrame:
        """Per-client accuracy and loss of every model, as a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.columns)

    def to_pandas(self) -> pd.DataFrame:
        """Return `clients` with the run, its method, seed and split (a fingerprint) first, to join with others."""
        import pandas as pd

        named = next(iter(self.rows), {"method": None, "seed": None})
        split = read_json(self.path / "split.json")["fingerprint"][:12]
        whose = {"run": str(self.path), "method": named["method"], "seed": named["seed"], "data": split}
        return pd.DataFrame(
            {**{key: [value] * len(self.columns["client"]) for key, value in whose.items()}, **self.columns}
        )

    def clients_csv(self) -> str:
        """Return the clients' table as CSV."""
        return csv_text([self.columns, *zip(*self.columns.values(), strict=True)])

    def table(self) -> pd.DataFrame:
        """Return the rows as a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return what is written to result.json."""
        return {"rows": self.rows, "clients": self.columns, "peak_memory_mb": self.peak_memory_mb}

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the result of a finished run."""
        values = read_json(path / "result.json")
        rows = [_in_order(row, ROW) for row in values["rows"]]
        return cls(path, rows, _in_order(values["clients"], CLIENT), values["peak_memory_mb"])


def make_result(
    path: Path,
    recipe: Recipe,
    federation: Federation,
    scored: Mapping[str, Scored],
    totals: Checkpoint,
    sizes: Mapping[str, Mapping[str, Size]],
) -> Result:
    """Summarise the final scores of each group of clients."""
    groups = {clients: _with_choice(part, recipe.evaluation.caution) for clients, part in scored.items()}
    score = task_named(federation.data.task).score
    named = {} if score == "accuracy" else {"score": score}
    spent, samples = guarantee(recipe, federation, totals.rounds), ledger(recipe, federation, totals.rounds)
    members = {"seen": federation.data.seen, "unseen": federation.data.unseen}
    rows = []
    for clients, scores_of in groups.items():
        for (model, split), scores in sorted(scores_of.items()):
            summary = summarize(scores.accuracy, scores.loss, scores.samples, scores.metrics)
            if not summary.count:
                continue
            size = sizes[clients]["personal" if model == "chosen" else model]  # a blend takes as much room
            shared = scores_of.get(("global", split))
            worse = hurt(scores.accuracy, shared.accuracy, scores.samples) if shared and model != "global" else None
            rows.append(
                {
                    "method": recipe.label or federation.algorithm.name,
                    "seed": recipe.seed,
                    "model": model,
                    "clients": clients,
                    "split": split,
                    **summary.facts(),
                    **named,
                    "share_hurt": worse.share if worse else None,
                    "share_hurt_low": worse.low if worse else None,
                    "share_hurt_high": worse.high if worse else None,
                    "hurt_mean_loss": worse.mean_loss if worse else None,
                    "loss": summary.loss if math.isfinite(summary.loss) else None,  # JSON has no NaN
                    "bytes_up": totals.bytes_up,
                    "bytes_down": totals.bytes_down,
                    "parameters": size.parameters,
                    "bytes_stored": size.bytes,
                    "seconds": totals.seconds,
                    **({} if totals.time is None else {"time": totals.time}),
                    **({} if recipe.fairness is None else {"q": recipe.fairness.q}),
                    **({} if spent is None else spent.facts()),
                    **({} if samples is None else samples.facts(members[clients])),
                }
            )
    own = {} if samples is None else samples.columns(np.concatenate(list(members.values())))
    columns = _in_order(_columns(recipe, federation, groups) | own, CLIENT)
    return Result(path, [_in_order(row, ROW) for row in rows], columns, peak_memory())


def _in_order(values: Mapping[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
    """Return values with some keys first and the others by name: the order is the same when read from a file."""
    return {key: values[key] for key in [*first, *sorted(values.keys() - set(first))] if key in values}


def _with_choice(scored: Scored, caution: float) -> dict[tuple[str, str], Scores]:
    """Return the scores of the models, the blends left out, and what each client chose by its validation data.

    Who cannot choose, because its device has another architecture or fewer bits, keeps its own model.
    """
    kept = {key: scores for key, scores in scored.scores.items() if not key[0].startswith("blend")}
    names, picks = chosen(scored, caution)
    if not names:
        return kept
    kept["chosen", "test"] = picked([scored.scores[name, "test"] for name in names], picks)
    return kept


def chosen(scored: Scored, caution: float) -> tuple[list[str], NDArray[np.int64]]:
    """Return the names of the models that clients can choose from, the global one first, and which each one chose.

    Who cannot choose keeps its own model, the last one. Without validation data there are no names.
    """
    candidates = [name for name in (*(f"blend {share}" for share in SHARES), _last(scored)) if name in scored.gains]
    if not candidates:
        return [], np.zeros(0, dtype=np.int64)
    evidence = evidence_of([scored.gains[name] for name in candidates])
    picks = np.full(len(scored.chooses), len(candidates))  # the last candidate is the client's own model
    picks[scored.chooses] = choose(evidence[scored.chooses], caution)
    return ["global", *candidates], picks


def _last(scored: Scored) -> str:
    """Return the name of the personal model that comes last."""
    return "tuned" if "tuned" in scored.gains else "personal"


def _columns(recipe: Recipe, federation: Federation, groups: Groups) -> dict[str, list[Any]]:
    """One list per column: who the client is, how much data it has, and its scores."""
    data = federation.data
    order = np.concatenate([data.seen, data.unseen])
    columns: dict[str, list[Any]] = {
        "client": order.tolist(),
        "name": [data.client_names[client] for client in order],
        "clients": ["seen"] * len(data.seen) + ["unseen"] * len(data.unseen),
        "train": data.train.sizes[order].tolist(),
        "validation": data.validation.sizes[order].tolist(),
        "test": data.test.sizes[order].tolist(),
    }
    if recipe.devices:
        names = device_names(recipe.devices)
        columns["device"] = [names[which] for which in federation.problem_of[order]]
    if federation.cloud is not None:
        columns["server"] = federation.cloud.topology.home[order].tolist()
    places = {"seen": slice(0, len(data.seen)), "unseen": slice(len(data.seen), len(order))}
    for clients, (model, split), scores in ((c, key, s) for c, part in groups.items() for key, s in part.items()):
        for measure, values in scores.measures().items():
            column = columns.setdefault(f"{model}_{split}_{measure}", [None] * len(order))
            column[places[clients]] = [float(value) if math.isfinite(value) else None for value in values]
    return columns
