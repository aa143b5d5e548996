"""What the files of this folder say: a paper's tables with their printed numbers, its settings and its claims.

PAPER.toml           [datasets.KEY], [[differs]], [settings.NAME] and [tables.NAME] of a paper
printed/PAPER.toml   [[printed]]: the settings that the paper itself names
recipes/NAME.toml    the recipes that settings start from
"""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from personafl.errors import BadInput, did_you_mean
from personafl.options import Strict

FOLDER = Path(__file__).parent
PAPERS = ("fedalt", "fedslr", "quped", "fedbcd", "pfllib")

SizeName = Literal["small", "paper"]
MEASURES = {
    "accuracy": "accuracy in %, mean over clients",
    "weighted": "accuracy in %, clients weighted by their test samples",
    "word-errors": "word error rate in %, clients weighted by their test samples",
    "hurt": "% of clients that are worse off than with the global model",
    "hurt-training": "the same on their training data",
    "parameters": "millions of parameters",
    "gigabytes": "GB sent in all, up and down",
    "last-megabytes": "MB sent down in the last round",
    "learning": "accuracy in %, mean over the scorings during training",
    "best": "accuracy in %, clients weighted by their test samples, in the round that is best on test data",
    "validated": "the same in the round that is best on validation data",
    "time-to": "virtual time until an accuracy, between scorings on a straight line",
    "time": "virtual time of all rounds",
}
Measure = Annotated[str, Field(pattern=f"^({'|'.join(MEASURES)})$")]


class Dataset(Strict):
    """Data that a setting needs and that do not come with the package."""

    comes_from: str
    contains: str  # what the file or folder must have
    files: tuple[str, ...]  # patterns looked for in a folder of data sets, the first that is there
    samples: int | None = None  # of the whole data set; None: that is not fixed
    shape: tuple[int, ...] = ()  # of an input; (): a text of as many tokens as the recipe says
    classes: int | None = None  # None: as many as tokens are told apart
    task: Literal["classification", "next-token", "ctc"] = "classification"


class Size(Strict):
    """A setting at one size: what it changes in the recipe, on which data, and how long that takes."""

    dataset: str = "digits"  # a key of [datasets]
    changes: tuple[str, ...] = ()  # key.sub=value, as on the command line
    # Of all runs of the setting: small as on 2 cores, measured or scaled; paper by multiply-adds, at 10 TFLOP/s.
    hours: Annotated[float, Field(gt=0)]


class Setting(Strict):
    """One comparison: a recipe at two sizes; several tables may be read from it.

    In a file, `like` names another setting that it starts from: its changes come after that one's.
    """

    recipe: str
    changes: tuple[str, ...] = ()
    small: Size
    paper: Size

    def at(self, size: SizeName) -> Size:
        """Return it at a size."""
        return self.small if size == "small" else self.paper


class _Group(Strict):
    """Something about keys of some settings' recipes, in some of their runs."""

    settings: tuple[str, ...] = ()  # names; none: all
    runs: tuple[str, ...] = ()  # patterns of methods and variants, as *-2bit; none: all

    def of_setting(self, name: str) -> bool:
        """Say whether it is about a setting."""
        return not self.settings or name in self.settings

    def of_run(self, name: str) -> bool:
        """Say whether it is about a method or variant."""
        return not self.runs or any(fnmatchcase(name, pattern) for pattern in self.runs)


class Differs(_Group):
    """What a setting has otherwise than the paper, or where the paper leaves it open: why, by key of the recipe.

    A key stands for all below it: `data` for `data.test`.
    """

    sizes: tuple[SizeName, ...] = ("small", "paper")
    why: dict[str, str]


class Value(Strict):
    """What a paper prints for a key: `value` in the recipe's unit, `text` as it stands there, and how one is the other.

    Without a value it is something that recipes have no key for.
    """

    value: Any = None
    text: str | None = None
    how: str | None = None
    within: float = 0.0  # how far ours may be away, where the paper rounds


class Printed(_Group):
    """Settings that a paper names in one place."""

    where: str
    values: dict[str, Value]

    @field_validator("values", mode="before")
    @classmethod
    def _plain_values(cls, values: Any) -> Any:
        """Let a value that needs no explanation stand alone."""
        if not isinstance(values, dict):
            return values
        return {key: value if isinstance(value, dict) else {"value": value} for key, value in values.items()}


class Row(Strict):
    """A line of a table: the paper's name and number, and which run and model it is here."""

    name: str
    of: str  # RUN.MODEL, where RUN is a method or variant of the recipe
    minus: str | None = None  # another model of that run, which is subtracted
    measure: Measure | None = None  # None: the table's
    level: float | None = None  # of time-to, in %
    paper: float | None = None  # None: only drawn, not printed
    std: float | None = None

    @property
    def run(self) -> str:
        """The method or variant."""
        return self.of.rpartition(".")[0]

    @property
    def model(self) -> str:
        """The model that is scored."""
        return self.of.rpartition(".")[2]


class Claim(Strict):
    """`more` ≥ `less` − margin, for two lines of a table; `text` is how the file has it."""

    text: str
    more: str
    less: str
    margin: float = 0.0

    @property
    def sign(self) -> int:
        """1 if `more` comes first in the text, else −1: a difference is of the first and the second."""
        return 1 if self.text.startswith(f"{self.more} ≥") else -1

    @classmethod
    def parse(cls, text: str) -> Claim:
        """Read "A ≥ B", "A ≥ B − 0.5" or "A ≤ B"."""
        found = re.fullmatch(r"(.+?) (≥|≤) (.+?)(?: [−+] ([\d.]+))?", text)
        if not found:
            raise ValueError(f"{text!r}: a claim reads A ≥ B, A ≥ B − 0.5 or A ≤ B")
        first, sign, second, margin = found.groups()
        more, less = (first, second) if sign == "≥" else (second, first)
        return cls(text=text, more=more, less=less, margin=float(margin or 0))


class Table(Strict):
    """A table or figure of a paper, or one column of it."""

    title: str
    where: str  # in the paper
    setting: str | None = None  # None: it is not made by runs
    instead: str | None = None  # then: what shows it
    measure: Measure = "accuracy"
    at: tuple[int, ...] = ()  # rounds: all lines and claims are also given after each of them
    rows: tuple[Row, ...] = ()
    claims: tuple[str, ...] = ()

    @property
    def runs(self) -> tuple[str, ...]:
        """The methods and variants it needs."""
        return tuple(dict.fromkeys(row.run for row in self.rows))

    def parsed_claims(self) -> list[Claim]:
        """Return what the paper says of the lines."""
        return [Claim.parse(text) for text in self.claims]


class Paper(Strict):
    """A paper: what it is, and its tables."""

    key: str
    cite: str
    datasets: dict[str, Dataset]
    differs: tuple[Differs, ...]
    printed: tuple[Printed, ...]
    settings: dict[str, Setting]
    tables: dict[str, Table]

    @field_validator("settings", mode="before")
    @classmethod
    def _alike(cls, settings: Any) -> Any:
        return {name: _like(settings, setting) for name, setting in settings.items()}

    def differing(self, setting: str, size: SizeName) -> list[Differs]:
        """Return what a setting at a size has otherwise than the paper."""
        return [group for group in self.differs if group.of_setting(setting) and size in group.sizes]


@cache
def papers() -> dict[str, Paper]:
    """Return all papers by their keys."""
    return {
        key: Paper.model_validate({"key": key, **_read(f"{key}.toml"), **_read(f"printed/{key}.toml")})
        for key in PAPERS
    }


def _like(settings: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return a setting with what the one has that it is like."""
    if "like" not in own:
        return own
    base = _like(settings, settings[own["like"]])
    joined = {**base, **own, "changes": [*base.get("changes", []), *own.get("changes", [])]}
    for size in ("small", "paper"):
        before, after = base[size], own.get(size, {})
        changes = [*before.get("changes", []), *after.get("changes", [])]
        joined[size] = {**before, **after, "changes": changes}
    return {key: value for key, value in joined.items() if key != "like"}


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / name).read_text(encoding="utf-8"))


def find(name: str) -> tuple[Paper, list[str]]:
    """Return the paper and the tables that PAPER, PAPER/TABLE or the beginning of a table's name (table1) mean."""
    key, slash, table = name.partition("/")
    if key not in papers():
        raise BadInput(f"{name}: no paper {key!r}; {did_you_mean(key, papers())}")
    paper = papers()[key]
    if not slash:
        return paper, list(paper.tables)
    if table in paper.tables:
        return paper, [table]
    names = [other for other in paper.tables if other.startswith(f"{table}-")]
    if not names:
        raise BadInput(f"{name}: {key} has no {table!r}; {did_you_mean(table, paper.tables)}")
    return paper, names
