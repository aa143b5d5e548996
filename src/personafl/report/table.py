"""The table of a comparison: methods × models, mean ± std over seeds; and what its columns mean.

The command line and the page show the same one.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from personafl.report.measure import metric_names, score_word

Row = dict[str, Any]  # of a result
MODELS = ("global", "personal", "tuned", "chosen")


def grid(*titles: str, texts: Sequence[str] = (), padding: int = 1, **columns: Any) -> Table:
    """Return an empty table for the terminal; columns are of numbers, to the right, but for `texts`."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, padding), collapse_padding=True)
    for title in titles:
        table.add_column(title, justify="left" if title in texts else "right", **columns)
    return table


@dataclass(frozen=True)
class Line:
    """A method's cells under `titles`; in those with a number in `best` no other one is better."""

    method: str
    cells: tuple[str, ...]
    best: frozenset[int]


def main_split(rows: Sequence[Row]) -> str:
    """Return the split that the first tables are of: test data, or validation data if those were left unread."""
    return "test" if any(row["split"] == "test" for row in rows) else "validation"


def _splits(rows: Sequence[Row]) -> list[str]:
    """Return the splits that tables are of: the main one; training data."""
    return [main_split(rows), *(["train"] if any(row["split"] == "train" for row in rows) else [])]


def groups(rows: Sequence[Row], split: str = "test") -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of seen and of unseen clients on one split."""
    for clients in ("seen", "unseen"):
        part = [row for row in rows if row["clients"] == clients and row["split"] == split]
        if part:
            yield clients, part


def heading(rows: Sequence[Row], clients: str, split: str = "test") -> str:
    """Return what a table is about: whose score, on what, over which seeds."""
    seeds = sorted({row["seed"] for row in rows})
    several = f"mean ± std over {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    data = "training" if split == "train" else split
    score = score_word(rows)
    return f"{score[0].upper()}{score[1:]} in % · {rows[0]['count']} {clients} clients · {data} data · {several}"


def titled(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of each table and what it is about: splits × groups of clients."""
    for split in _splits(rows):
        for clients, part in groups(rows, split):
            yield heading(part, clients, split), part


def models_of(rows: Sequence[Row]) -> list[str]:
    """Return the models that were scored, in the order of the columns."""
    return [model for model in MODELS if any(row["model"] == model for row in rows)]


def titles(rows: Sequence[Row]) -> list[str]:
    """Return the titles of the columns, of which some have two lines."""
    models = models_of(rows)
    hurt = [] if not _any_hurt(rows) else ["hurt", "hurt\nafter"] if "chosen" in models else ["hurt"]
    timed = ["virtual\ntime"] if _timed(rows) else []
    spoken = [*(["WER"] if has_words(rows) else []), *metric_names(rows)]
    sizes = ["size\nkB"] if _sized(rows) else []
    private = [*(["ε"] if _private(rows) else []), *(["sample\nε"] if _samples_private(rows) else [])]
    spread = ["std of\nclients"] if _fair(rows) else []
    return [
        "method",
        *models,
        "worst\n10%",
        *spread,
        *spoken,
        *hurt,
        *private,
        *sizes,
        "MB\nup",
        "MB\ndown",
        *timed,
        "sec",
    ]


def lines(rows: Sequence[Row], joint: str = "±") -> Iterator[Line]:
    """Yield a line per method; `joint` stands before a standard deviation."""
    models, hurt, timed = models_of(rows), _any_hurt(rows), _timed(rows)
    names = list(dict.fromkeys(row["method"] for row in rows))
    own = {(name, m): [r for r in rows if r["method"] == name and r["model"] == m] for name in names for m in models}
    top = {m: max(mean(own[name, m], "accuracy", -math.inf) for name in names) for m in models}
    for name in names:
        last = last_models([row for row in rows if row["method"] == name])
        cells = [
            name,
            *(percent(own[name, m], "accuracy", joint) for m in models),
            percent(last, "worst_decile", joint),
            *([percent(last, "accuracy_std", joint)] if _fair(rows) else []),
            *([percent(last, "word_error", joint)] if has_words(rows) else []),
            *((percent if key == "backdoor" else plain)(last, key, joint) for key in metric_names(rows)),
            *([percent(last, "share_hurt", joint)] if hurt else []),
            *([percent(own[name, "chosen"], "share_hurt", joint)] if hurt and "chosen" in models else []),
            *([amount(last[0]["epsilon"]) if "epsilon" in last[0] else "–"] if _private(rows) else []),
            *([_most_spent(last)] if _samples_private(rows) else []),
            *([amount(mean(last, "bytes_stored", 0.0) / 1e3)] if _sized(rows) else []),
            *(amount(mean(last, key, 0.0) / 1e6) for key in ("bytes_up", "bytes_down")),
            *([amount(mean(last, "time", 0.0)) if "time" in last[0] else "–"] if timed else []),
            amount(mean(last, "seconds", 0.0)),
        ]
        best = [at for at, m in enumerate(models, 1) if own[name, m] and mean(own[name, m], "accuracy", 0.0) == top[m]]
        yield Line(name, tuple(cells), frozenset(best if len(names) > 1 else ()))


def last_models(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a method's last personal model, or of its global one if there is none."""
    by_model = {model: [row for row in rows if row["model"] == model] for model in MODELS}
    return by_model["tuned"] or by_model["personal"] or by_model["global"]


def legend(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the columns that need words, and these."""
    models, timed = {row["model"] for row in rows}, _timed(rows)
    whose = "the model that all clients of a server share" if timed else "the model all clients share"
    found = [("global", whose)] if "global" in models else []
    if "personal" in models:
        found.append(("personal", "the client's own model"))
    if "tuned" in models:
        found.append(("tuned", "the client's own model after fine-tuning"))
    if "chosen" in models:
        found.append(("chosen", "global, personal or between, by the validation data of the client and of all clients"))
    about = " (with the last personal model, if any)" if {"global", "personal"} <= models else ""
    found.append(("worst 10%", f"mean {score_word(rows)} of the worst decile of clients{about}"))
    if _fair(rows):
        found.append(("std of clients", f"standard deviation of {score_word(rows)} over clients{about}"))
    if has_words(rows):
        found.append(("WER", f"word error rate in %: edits of whole words per word{about}"))
    if names := [name for name in metric_names(rows) if name != "backdoor"]:
        found.append((", ".join(names), f"means over clients, in their own units{about}"))
    if "backdoor" in metric_names(rows):
        how = "% of test samples of other classes that its trigger makes the target's, mean over honest clients"
        found.append(("backdoor", f"{how}{about}"))
    if _any_hurt(rows):
        after = "; after: with the chosen model" if "chosen" in models else ""
        found.append(("hurt", f"% of clients whose personal model is worse than the global one{after}"))
    if _private(rows):
        deltas = sorted({row["delta"] for row in rows if "delta" in row})
        rests = sorted({row["assumption"] for row in rows if row.get("assumption")})
        spent = f"with δ = {', '.join(f'{delta:g}' for delta in deltas)}; what clients keep costs nothing"
        spent += f"; {'; or '.join(rests)}" if rests else ""
        found.append(("ε", f"what the shared models may tell of whether a client took part, {spent}"))
    if _samples_private(rows):
        deltas = sorted({row["sample_delta"] for row in rows if "sample_delta" in row})
        what = "what clients send" if any(row.get("sample_covers") == "sent" for row in rows) else "a client's models"
        spent = f"with δ = {', '.join(f'{delta:g}' for delta in deltas)}; that of the client which spent most"
        found.append(("sample ε", f"what {what} may tell of any one sample of its data, {spent}"))
    if _sized(rows):
        found.append(("size", f"kB that a device needs to store its model{about}"))
    if timed:
        found.append(("virtual time", "when the last round ended, by the recipe's latencies"))
    return found


def mean(rows: Sequence[Row], key: str, otherwise: float) -> float:
    """Return the mean of a key over rows, if there are any."""
    return statistics.mean(row[key] for row in rows) if rows else otherwise


def percent(rows: Sequence[Row], key: str, joint: str | None = None) -> str:
    """Return the mean in %; with a joint also the standard deviation over seeds."""
    values = [100 * row[key] for row in rows if row.get(key) is not None]
    if not values:
        return "–"
    spread = f"{joint}{statistics.stdev(values):.1f}" if joint and len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def plain(rows: Sequence[Row], key: str, joint: str) -> str:
    """Return the mean of a metric in its own units, and the standard deviation over seeds."""
    values = [row[key] for row in rows if row.get(key) is not None]
    if not values:
        return "–"
    spread = f"{joint}{statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4g}{spread}"


def amount(value: float) -> str:
    """Return three digits or so."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def speed(clients: float) -> str:
    """Return how many clients are trained in a second; of slow ones a decimal, for 0 says nothing."""
    return f"{clients:,.{0 if clients >= 9.95 else 1}f} clients/s"


def has_words(rows: Sequence[Row]) -> bool:
    """Say whether targets are words, so that there are word error rates."""
    return any("word_error" in row for row in rows)


def _any_hurt(rows: Sequence[Row]) -> bool:
    return any(row["share_hurt"] is not None for row in rows)


def _sized(rows: Sequence[Row]) -> bool:
    return len({row["bytes_stored"] for row in rows}) > 1  # else a column of one number


def _fair(rows: Sequence[Row]) -> bool:
    return any("q" in row for row in rows)


def _private(rows: Sequence[Row]) -> bool:
    return any("epsilon" in row for row in rows)


def _samples_private(rows: Sequence[Row]) -> bool:
    return any("sample_epsilon" in row for row in rows)


def _most_spent(rows: Sequence[Row]) -> str:
    found = [row["sample_epsilon"] for row in rows if "sample_epsilon" in row]
    return amount(max(found)) if found else "–"


def _timed(rows: Sequence[Row]) -> bool:
    return any("time" in row for row in rows)
