"""What was run: commands, recipes, data, and how far each run got."""

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from personafl.report.load import Run, Source, read_text
from personafl.storage.rundir import resume_command


@dataclass(frozen=True, kw_only=True)
class RecipeText:
    """A recipe as its file has it, and where that is as seen from the page."""

    title: str
    link: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How far a run got."""

    name: str
    done: int
    rounds: int
    finished: bool
    link: str  # to its recipe; empty: it has not begun

    @property
    def words(self) -> str:
        """Where it stands."""
        if self.finished:
            return "finished"
        if not self.link:
            return "not begun"
        return f"{self.done} of {self.rounds} rounds" if self.done < self.rounds else "rounds done, not yet scored"


def recipes(sources: Sequence[Source], folder: Path) -> list[RecipeText]:
    """Return the recipe of everything that was asked for."""
    return [
        RecipeText(
            title=f"{source.path.name}/{source.recipe_file}",
            link=_link(source.path / source.recipe_file, folder),
            text=read_text(source.path / source.recipe_file),
        )
        for source in sources
    ]


def standings(sources: Sequence[Source], folder: Path) -> list[Standing]:
    """Return how far each run got."""
    return [
        Standing(
            name=f"{run.label}, seed {run.seed}",
            done=max((entry["number"] + 1 for entry in run.trained), default=0),
            rounds=run.rounds,
            finished=run.result is not None,
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
    if not begun:
        return
    split = begun[0].split
    samples = " / ".join(f"{sum(split['samples'][part]):,}" for part in ("train", "validation", "test"))
    yield "data", f"{split['name']}: {samples} samples to train / validate / test (seed {begun[0].seed})"
    yield "clients", f"{split['clients']:,} ({len(split['seen']):,} seen, {len(split['unseen']):,} unseen)"
    yield "split", _partition(begun[0])
    prints = {run.seed: run.split["fingerprint"][:12] for run in begun}
    yield "fingerprints", ", ".join(f"seed {seed}: {text}" for seed, text in sorted(prints.items()))
    yield "machine", " or ".join(sorted({_machine(run) for run in begun}))
    yield "versions", " or ".join(sorted({_versions(run) for run in begun}))
    objects = sorted({name for run in begun for name in run.environment.get("objects", [])})
    if objects:
        yield "given in Python", f"{', '.join(objects)}: the recipe alone does not repeat the run"
    for note in split.get("notes", []):
        yield "note", note


def resume_commands(sources: Sequence[Source]) -> list[str]:
    """Return what continues the sources that are not finished."""
    return [resume_command(source.path) for source in sources if any(run.result is None for run in source.runs)]


def _partition(run: Run) -> str:
    partition = run.recipe["data"].get("partition", {})
    rest = ", ".join(f"{key} = {value}" for key, value in partition.items() if key != "kind")
    return f"{partition.get('kind', '–')}" + (f" ({rest})" if rest else "")


def _machine(run: Run) -> str:
    threads = run.environment.get("threads", "?")
    return f"{run.environment.get('device', '?')}, {threads} thread{'' if threads == 1 else 's'}"


def _versions(run: Run) -> str:
    return ", ".join(f"{name} {version}" for name, version in run.environment["packages"].items())


def _link(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
