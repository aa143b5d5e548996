"""What runs found, as Python has it: tables, each client's model, predictions, more rounds."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from personafl.api.calls import path_of
from personafl.api.directories import FailedRun, failed_in, recipe_of, runs_of, wants_pick, write_own_page
from personafl.api.progress import Callback, told
from personafl.errors import BadInput
from personafl.exports.client import Kind, client_network, generated, predicted
from personafl.exports.export import Exported, write_models
from personafl.exports.finished import Finished
from personafl.report.table import last_models
from personafl.runs.extension import check_alone, copied, longer, prolong
from personafl.runs.given import NOTHING, Given, check_objects
from personafl.runs.job import check_split
from personafl.runs.result import Result as Found
from personafl.runs.whole import run_in
from personafl.storage.rundir import RunDirectory, resume_command

if TYPE_CHECKING:
    import pandas as pd

    from personafl.report.picking import Picked


@dataclass(frozen=True, repr=False)
class Result(Found):
    """The outcome of a run: `rows`, one per model × clients × split, and `clients`, a table with a line per client."""

    given: Given = field(default=NOTHING, compare=False)  # the objects that the run was begun with

    @classmethod
    def of(cls, found: Found, given: Given) -> Result:
        """Return what a run found, together with the objects that its models need."""
        return cls(found.path, found.rows, found.columns, found.peak_memory_mb, given)

    @functools.cached_property
    def _finished(self) -> Finished:
        return Finished(self.path, self.given)

    def model(self, client: str, kind: Kind | None = None) -> nn.Module:
        """Return a client's network, ready to predict: in evaluation mode, for inputs in the units of the data.

        It is the client's personal model (fine-tuned, if it was), or the global one where the method makes no personal
        ones. `kind` asks for the "global" or "personal" one, or for the one "chosen" by validation data.
        """
        return client_network(self._finished, str(client), kind)

    def predict(self, client: str, x: Any, *, kind: Kind | None = None, probabilities: bool = False) -> Any:
        """Predict with a client's model: x is a table like the data, or an array or tensor [samples, …].

        Returns an array with the names of classes (numbers, where the labels were numbers); with probabilities=True a
        DataFrame with a column per class.
        """
        return predicted(self._finished, str(client), x, kind, probabilities)

    def generate(
        self,
        client: str,
        prompt: str,
        *,
        kind: Kind | None = None,
        tokens: int = 100,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> str:
        """Return how a client's language model continues a prompt, by at most so many tokens.

        Each token is the most probable one, or with a temperature T drawn from softmax(scores / T), by the seed.
        """
        options = {"most": tokens, "temperature": temperature, "seed": seed}
        return generated(self._finished, str(client), prompt, kind, **options)

    def extend(
        self,
        rounds: int,
        *,
        out: str | Path | None = None,
        callback: Callback | None = None,
        progress: bool | None = None,
    ) -> Result:
        """Go on for so many more rounds, and return the new result: the same as if the run had had them all.

        The run goes on in its directory, and this result is then of the past; with `out` in a copy of it. Where what
        was done depends on the number of rounds, as with a linear schedule of the learning rate, it is refused.
        `callback` and `progress` are those of `run`.
        """
        if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
            raise BadInput(f"rounds = {rounds!r}: give how many more, at least 1")
        path, recipe, given = self.path, recipe_of(self.path), self.given
        whole = longer(recipe, recipe.rounds + rounds, path).rounds  # what can fail does before anything is changed
        check_objects(path, given, "open it with them: personafl.load({path}, {objects})")
        data = given.dealt(recipe)
        check_split(path, data)
        if out is None:
            check_alone(path)
        else:
            path = path_of(out, "out")
        with told(recipe, callback, progress, None) as listeners:
            if out is not None:
                copied(self.path, path)
            heard = listeners(recipe.label or recipe.method.name, recipe.seed)
            found = run_in(path, prolong(path, whole), data=data, given=given, listener=heard)
        write_own_page(path)
        return Result.of(found, given)

    def export(
        self,
        out: str | Path | None = None,
        clients: Sequence[str] | Literal["all"] | None = None,
        *,
        onnx: bool = False,
        peft: bool = False,
    ) -> Exported:
        """Write the global model, and those of some or "all" clients, as files for devices; see `personafl.export`."""
        return write_models(self.path, out, clients, self.given, onnx=onnx, peft=peft)

    def history(self) -> pd.DataFrame:
        """Return a line per round: training loss, clients, bytes, seconds; and accuracies of models, where scored."""
        import pandas as pd

        lines: dict[int, dict[str, Any]] = {}
        for entry in RunDirectory(self.path).metrics():
            line = lines.setdefault(entry["number"] + 1, {"round": entry["number"] + 1})
            if entry["event"] == "round":
                line |= {key: entry[key] for key in ("loss", "clients", "bytes_up", "bytes_down", "seconds")}
            elif entry["event"] == "score":
                line[f"{entry['model']}_{entry['split']}_accuracy"] = entry["accuracy"]
        return pd.DataFrame(list(lines.values()))

    def __str__(self) -> str:
        from personafl.api.shown import table_text

        return table_text(self.rows, [f"run directory: {self.path}"])

    def _repr_html_(self) -> str:
        from personafl.api.shown import table_html

        return table_html(self.path, self.rows, [])


@dataclass(frozen=True)
class Best:
    """The method of a comparison that is best, and by what."""

    method: str
    model: str  # global, personal or tuned
    accuracy: float  # mean over clients that took part, and over seeds
    split: str  # of the data that it is the accuracy on
    results: tuple[Result, ...] = field(repr=False)  # its runs, one per seed

    def __str__(self) -> str:
        seeds = f", mean over {len(self.results)} seeds" if len(self.results) > 1 else ""
        return f"{self.method}: {100 * self.accuracy:.1f} % on {self.split} data ({self.model} model{seeds})"


@dataclass(frozen=True, repr=False)
class Comparison:
    """Several methods and seeds on the same splits; runs that failed are among the failures, with their reasons."""

    path: Path
    results: tuple[Result, ...]
    failures: tuple[FailedRun, ...] = ()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows of all runs."""
        return [row for result in self.results for row in result.rows]

    def table(self) -> pd.DataFrame:
        """Return all rows as one table."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def to_pandas(self) -> pd.DataFrame:
        """Return a line per client and run; see `Result.to_pandas`."""
        return joined(self.results)

    def best(self) -> Best:
        """Return the method with the best accuracy, on average over clients that took part and over seeds.

        Of each method it is the model that it is about: the last personal one, or the global one where there is no
        other. It is judged by validation data where there are any, for who chooses by test data reports too much.
        """
        split = "validation" if any(row["split"] == "validation" for row in self.rows) else "test"
        found = []
        for method in dict.fromkeys(row["method"] for row in self.rows):
            runs = tuple(result for result in self.results if result.rows and result.rows[0]["method"] == method)
            rows = [row for run in runs for row in run.rows if (row["clients"], row["split"]) == ("seen", split)]
            if last := last_models(rows):
                mean = statistics.mean(row["accuracy"] for row in last)
                found.append(Best(method, last[0]["model"], mean, split, runs))
        if not found:
            raise BadInput(f"{self.path}: has no result to choose from; {'; '.join(map(str, self.failures))}")
        return max(found, key=lambda best: best.accuracy)

    def picked(self) -> Picked:
        """Return which method validation data alone pick, and how far from the best on test data it is.

        `whole` is the pick by all seeds and `seeds` by each alone: method, scores on validation and test data, the best
        method on test data, and how far `behind` it the pick is.
        """
        from personafl.report.picking import pick

        return pick([(result.rows[0]["method"], result) for result in self.results if result.rows])

    def __repr__(self) -> str:
        methods = ", ".join(dict.fromkeys(row["method"] for row in self.rows))
        failed = f", failures={len(self.failures)}" if self.failures else ""
        return f"Comparison({str(self.path)!r}, methods=[{methods}], runs={len(self.results)}{failed})"

    def __str__(self) -> str:
        from personafl.api.shown import table_text

        return table_text(self.rows, [*self._notes(), f"run directory: {self.path}"])

    def _repr_html_(self) -> str:
        from personafl.api.shown import table_html

        return table_html(self.path, self.rows, self._notes())

    def _notes(self) -> list[str]:
        """Return which runs failed, what was picked if that was asked for, and whose personal models are behind."""
        from personafl.report.findings import behind
        from personafl.report.picking import picked_in

        found = [(result.rows[0]["method"], result) for result in self.results if result.rows]
        picked = picked_in(found) if wants_pick(self.path) else None
        said = [] if picked is None else [str(picked)]
        return [*map(str, self.failures), *said, *(f"warning: {line}" for line in behind(found))]


def joined(results: Sequence[Found]) -> pd.DataFrame:
    """Return the clients of several runs as one table; what a run does not have is empty."""
    import pandas as pd

    return pd.concat([result.to_pandas() for result in results], ignore_index=True)


def finished_in(path: Path) -> list[Result]:
    """Return the results that there are of a run or comparison, which may be unfinished."""
    return [Result.load(child) for _, _, child in runs_of(path) if (child / "result.json").exists()]


def rows_of(path: Path) -> tuple[list[dict[str, Any]], list[tuple[Path, int, int]], list[FailedRun]]:
    """Return what there is of a run or comparison: rows, (path, rounds done, rounds) of the unfinished, failures."""
    rows: list[dict[str, Any]] = []
    unfinished, failed = [], failed_in(path)
    for method, seed, child in runs_of(path):
        if (child / "result.json").exists():
            rows += Result.load(child).rows
        elif (method, seed) not in [(run.method, run.seed) for run in failed]:
            unfinished.append((child, RunDirectory(child).checkpoint().rounds, recipe_of(path).rounds))
    return rows, unfinished, failed


def results_of(path: Path, given: Given = NOTHING) -> list[Result]:
    """Return the result of a finished run, or of all runs of a finished comparison that did not fail."""
    failed = failed_in(path)
    runs = [child for _, _, child in runs_of(path) if child not in [run.path for run in failed]]
    for child in runs:
        if not (child / "result.json").exists():
            raise BadInput(f"{path}: unfinished ({child.name}); continue with: {resume_command(path)}")
    if not runs:
        raise BadInput(f"{path}: has no result; {'; '.join(map(str, failed))}")
    return [Result.of(Result.load(child), given) for child in runs]
