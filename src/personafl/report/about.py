"""What was run: commands, recipes, data, and how far each run got."""

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from personafl.recipe.compare import read_tuned
from personafl.report.load import Source, read_text
from personafl.storage.rundir import resume_command


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How far a run got."""

    name: str
    done: int
    rounds: int
    finished: bool
    failed: str  # why; empty: it did not
    link: str  # to its recipe; empty: it has not begun

    @property
    def words(self) -> str:
        """Where it stands."""
        if self.finished:
            return "finished"
        if self.failed:
            return self.failed
        if not self.link:
            return "not begun"
        return f"{self.done} of {self.rounds} rounds" if self.done < self.rounds else "rounds done, not yet scored"


def recipes(sources: Sequence[Source], folder: Path) -> list[tuple[str, str, str]]:
    """Return the recipe of everything that was asked for: its title, where it is as seen from the page, its text."""
    files = [(f"{source.name}/{source.recipe_file}", source.path / source.recipe_file) for source in sources]
    return [(title, _link(path, folder), read_text(path)) for title, path in files]


def standings(sources: Sequence[Source], folder: Path) -> list[Standing]:
    """Return how far each run got."""
    return [
        Standing(
            name=f"{run.label}, seed {run.seed}",
            done=max((entry["number"] + 1 for entry in run.trained), default=0),
            rounds=run.rounds,
            finished=run.result is not None,
            failed="" if run.failure is None else run.failure.words,
            link=_link(run.path / "recipe.toml", folder) if run.begun else "",
        )
        for source in sources
        for run in source.runs
    ]


def command_of(source: Source) -> str:
    """Return the command that began a run or comparison; nothing for one that was begun in Python."""
    argv: list[str] = next((run.environment.get("command", []) for run in source.runs if run.begun), [])
    name = Path(argv[0]).name if argv else ""
    if name != "personafl":
        return ""
    return shlex.join([name, *argv[1:]])


def facts(sources: Sequence[Source]) -> Iterator[tuple[str, str]]:
    """Yield what the runs have in common, in words."""
    runs = [run for source in sources for run in source.runs]
    begun = [run for run in runs if run.begun]
    labels, seeds = list(dict.fromkeys(run.label for run in runs)), sorted({run.seed for run in runs})
    yield "methods", ", ".join(labels)
    yield "seeds", ", ".join(map(str, seeds))
    yield "rounds", " or ".join(f"{rounds:,}" for rounds in sorted({run.rounds for run in runs}))
    for source in sources:
        for label, found in read_tuned(source.path).items():
            yield f"tuned {label}", found.words
    if not begun:
        return
    split = begun[0].split
    samples = " / ".join(f"{sum(split['samples'][part]):,}" for part in ("train", "validation", "test"))
    yield "data", f"{split['name']}: {samples} samples to train / validate / test (seed {begun[0].seed})"
    yield "clients", f"{split['clients']:,} ({len(split['seen']):,} seen, {len(split['unseen']):,} unseen)"
    partition = dict(begun[0].recipe["data"].get("partition", {}))
    kind, rest = partition.pop("kind", "–"), ", ".join(f"{key} = {value}" for key, value in partition.items())
    yield "split", f"{kind} ({rest})" if rest else kind
    prints = {run.seed: run.split["fingerprint"][:12] for run in begun}
    yield "fingerprints", ", ".join(f"seed {seed}: {text}" for seed, text in sorted(prints.items()))
    on = {(run.environment.get("device", "?"), run.environment.get("threads", "?")) for run in begun}
    yield "machine", " or ".join(sorted(f"{name}, {count} thread{'' if count == 1 else 's'}" for name, count in on))
    packages = {", ".join(map(" ".join, run.environment["packages"].items())) for run in begun}
    yield "versions", " or ".join(sorted(packages))
    objects = sorted({name for run in begun for name in run.environment.get("objects", [])})
    if objects:
        yield "given in Python", f"{', '.join(objects)}: the recipe alone does not repeat the run"
    if "inputs" in split:
        yield "inputs", split["inputs"]
    for note in split.get("notes", []):
        yield "note", note


def resume_commands(sources: Sequence[Source]) -> list[str]:
    """Return what continues the sources that are not finished."""
    waits = [any(run.result is None and run.failure is None for run in source.runs) for source in sources]
    return [resume_command(source.path) for source, some in zip(sources, waits, strict=True) if some]


def anew_commands(sources: Sequence[Source]) -> list[str]:
    """Return what begins the failed runs of sources anew."""
    failed = [source for source in sources if any(run.failure is not None for run in source.runs)]
    return [f"{resume_command(source.path)} KEY=VALUE" for source in failed]


def _link(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
