"""Presets: tables of a paper at a size, as a recipe that runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from personafl.errors import BadInput, did_you_mean
from personafl.papers.catalog import FOLDER, Dataset, Paper, Setting, SizeName, Table, papers
from personafl.recipe.recipe import Recipe
from personafl.recipe.values import apply_overrides, put, read_toml

SIZES: tuple[SizeName, ...] = ("small", "paper")


@dataclass(frozen=True)
class Preset:
    """One comparison: the tables that are read from it, at one size."""

    paper: Paper
    setting_name: str
    tables: Mapping[str, Table]
    size: SizeName

    @property
    def setting(self) -> Setting:
        """The paper's setting."""
        return self.paper.settings[self.setting_name]

    @property
    def name(self) -> str:
        """The name of its recipe, from which a run directory is known again."""
        return f"{self.paper.key}-{self.setting_name}-{self.size}"

    @property
    def runs(self) -> tuple[str, ...]:
        """The methods and variants that its tables need."""
        return tuple(dict.fromkeys(run for table in self.tables.values() for run in table.runs))

    @property
    def hours(self) -> float:
        """About how long it takes: the setting's time, by the number of methods."""
        tables = tables_of_setting(self.paper, self.setting_name).values()
        return self.setting.at(self.size).hours * len(self.runs) / len({run for table in tables for run in table.runs})

    @property
    def differs(self) -> str:
        """What it has otherwise than the paper, in a sentence."""
        groups = self.paper.differing(self.setting_name, self.size)
        reasons = [why for group in groups if any(map(group.of_run, self.runs)) for why in group.why.values()]
        return "; ".join(dict.fromkeys(reasons)) or "nothing"

    def recipe(
        self,
        folder: Path | None = None,
        given: Mapping[str, Path] | None = None,
        changes: Sequence[str] = (),
        seeds: Sequence[int] | None = None,
    ) -> Recipe:
        """Return the recipe; data come from `given` (by key) or from a folder of data sets."""
        values = self.values()
        put(values, "data.source", str(self.source(folder, given)))
        if seeds is not None:
            put(values, "compare.seeds", list(seeds))
        return Recipe.parse(apply_overrides(values, changes), self.name).narrowed(None, None)

    def values(self) -> dict[str, Any]:
        """Return what the recipe says, without defaults and without where the data are."""
        values = read_toml(FOLDER / "recipes" / f"{self.setting.recipe}.toml")
        values = apply_overrides(values, [*self.setting.changes, *self.setting.at(self.size).changes])
        values["name"] = self.name
        put(values, "data.source", self.setting.at(self.size).dataset)
        put(values, "compare.methods", list(self.runs))
        return values

    def source(self, folder: Path | None = None, given: Mapping[str, Path] | None = None) -> str | Path:
        """Return where the data are, or fail and say where they come from."""
        key, given = self.setting.at(self.size).dataset, given or {}
        if unknown := [name for name in given if name not in self.paper.datasets]:
            raise BadInput(f"--dataset {unknown[0]}: {did_you_mean(unknown[0], self.paper.datasets)}")
        if key in given:
            return _existing(given[key], f"--dataset {key}")
        if key == "digits":
            return key
        needed = self.paper.datasets[key]
        found = _found(needed, _existing(folder, "--dataset-dir")) if folder is not None else None
        if found is None:
            place = f"{folder} has none of {', '.join(needed.files)}" if folder else "no file was given"
            raise BadInput(
                f"{self.name}: needs the data set {key!r}, and {place}. It comes from {needed.comes_from}; the file "
                f"must contain {needed.contains}. Give it with --dataset {key}=PATH, or --dataset-dir FOLDER"
            )
        return found


def presets(paper: Paper, tables: Sequence[str], size: SizeName) -> list[Preset]:
    """Return what makes these tables: one preset for all that share a setting."""
    by_setting: dict[str, dict[str, Table]] = {}
    for name in tables:
        if (setting := paper.tables[name].setting) is not None:
            by_setting.setdefault(setting, {})[name] = paper.tables[name]
    return [Preset(paper, setting, group, size) for setting, group in by_setting.items()]


def named_by(recipe: Recipe) -> Preset | None:
    """Return the preset that a run directory's recipe was made from, with all tables of its setting."""
    for paper in papers().values():
        for size in SIZES:
            for preset in presets(paper, list(paper.tables), size):
                if preset.name == recipe.name:
                    return preset
    return None


def tables_of_setting(paper: Paper, setting: str) -> dict[str, Table]:
    """Return the tables that are read from a setting's runs, by name."""
    return {name: table for name, table in paper.tables.items() if table.setting == setting}


def _found(needed: Dataset, folder: Path) -> Path | None:
    return next((path for pattern in needed.files for path in sorted(folder.glob(pattern))), None)


def _existing(path: Any, option: str) -> Path:
    place = Path(path).expanduser()
    if not place.exists():
        raise BadInput(f"{option}: {place}: no such file or folder; check the path")
    return place
