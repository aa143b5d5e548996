"""`personafl reproduce`: the papers' tables, ours beside theirs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from personafl.cli.console import note, print_found
from personafl.cli.options import Json, Out, Quiet, listed
from personafl.errors import BadInput, Failed

if TYPE_CHECKING:
    from personafl.papers.catalog import SizeName
    from personafl.papers.check import Checked
    from personafl.papers.preset import Preset
    from personafl.papers.show import Shown
    from personafl.recipe.recipe import Recipe

Form = Literal["text", "markdown", "json"]
Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PAPER[/TABLE]] [KEY.SUB=VALUE]...",
        help="What to repeat, as in fedalt/table4-emnist or quped/table2, and changes to its recipe; "
        "without it, the list of all.",
    ),
]
Size = Annotated[
    Literal["small", "paper"] | None,
    typer.Option(
        metavar="SIZE",
        help="small: minutes on 2 cores; paper: the paper's setting. If not given, small; of a check, both.",
    ),
]
Checking = Annotated[
    bool,
    typer.Option(
        "--check",
        metavar="",
        help="Run nothing: deal the data that are there, build every network, and print each setting beside the "
        "paper's; fails on a preset that cannot start, or differs from the paper without saying so.",
    ),
]


def reproduce(
    words: Names = None,
    size: Size = None,
    folder: Annotated[
        Path | None, typer.Option("--dataset-dir", metavar="DIR", help="Folder with the data sets that it needs.")
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(metavar="KEY=PATH", help="One data set, as in cifar10=PATH; may be repeated.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="NUMBERS", help="As in 0,1,2; if not given, the preset's.")
    ] = None,
    sources: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="DIR",
            help="Run nothing: judge a finished comparison, or all in a folder; may be repeated.",
        ),
    ] = None,
    checking: Checking = False,
    out_path: Out = None,
    markdown: Annotated[bool, typer.Option("--markdown", metavar="", help="Print Markdown.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Repeat tables of the papers: our numbers beside theirs, and whether their claims hold."""
    from personafl.papers import show
    from personafl.papers.catalog import find
    from personafl.papers.preset import presets

    form: Form = "json" if as_json else "markdown" if markdown else "text"
    names = [word for word in words or [] if "=" not in word]
    changes = [word for word in words or [] if "=" in word]
    if len(names) > 1:
        raise BadInput(f"{names[1]!r}: only one PAPER or PAPER/TABLE can be given; changes are written key.sub=value")
    if checking:
        if changes:
            raise BadInput(f"{changes[0]}: --check looks at presets as they are; leave changes out")
        _check(names, size, folder, _paths(dataset), form)
        return
    if sources:
        _print(show, _judged(sources, names[0] if names else None), form)
        return
    if not names:
        _list(as_json)
        return
    paper, tables = find(names[0])
    for name in tables:
        if (instead := paper.tables[name].instead) is not None:
            note(f"{paper.key}/{name}: not made by runs; instead: {instead}")
    chosen = presets(paper, tables, size or "small")
    given, numbers = _paths(dataset), _numbers(seeds)
    recipes = [preset.recipe(folder, given, changes, numbers) for preset in chosen]  # checked before any of them runs
    _run(list(zip(chosen, recipes, strict=True)), out_path, form, quiet)


def _check(names: list[str], size: SizeName | None, folder: Path | None, given: dict[str, Path], form: Form) -> None:
    """Check presets and print what was found; fail if one is not in order."""
    from personafl.papers import check
    from personafl.papers.catalog import find, papers
    from personafl.papers.preset import SIZES, presets

    found: list[Checked] = []
    for paper, tables in [find(name) for name in names or papers()]:
        for one in [size] if size else SIZES:
            own = {key: path for key, path in given.items() if key in paper.datasets}
            found += [check.check(preset, folder, own) for preset in presets(paper, tables, one)]
    _print(check, found, form)
    wrong = [one for one in found if one.problems]
    if wrong:
        raise BadInput(
            f"{len(wrong)} of {len(found)} presets are not in order: {wrong[0].preset.name}: {wrong[0].problems[0]}"
        )


def _run(work: Sequence[tuple[Preset, Recipe]], out_path: Path | None, form: Form, quiet: bool) -> None:
    """Run presets one after the other, and print what came out."""
    from personafl import api
    from personafl.cli.display import displayed
    from personafl.papers import show
    from personafl.papers.finished import tables_of_preset
    from personafl.papers.trial import lacking
    from personafl.storage.rundir import claim_name, refuse_existing

    if out_path is not None:
        refuse_existing(out_path)
    shown: list[Shown] = []
    failures: list[str] = []
    for preset, recipe in work:
        if preset.size == "paper" and (said := lacking(preset, recipe)):
            note(f"note: {said}")
        own = out_path if out_path is None or len(work) == 1 else out_path / preset.setting_name
        path = own or claim_name(Path("runs"), preset.name)

        def compare(listen: api.Listeners, recipe: Recipe = recipe, path: Path = path) -> api.Comparison:
            return api.compare(recipe, out=path, listener=listen)

        failures += map(str, displayed(recipe, path, quiet or form == "json", compare).failures)
        tables, _ = tables_of_preset(path, preset)
        shown += tables
        note(f"run directory: {path}")
    _print(show, shown, form)
    if failures:
        raise Failed(f"{len(failures)} of its runs failed: {'; '.join(failures)}")


def _judged(paths: list[Path], name: str | None) -> list[Shown]:
    """Return the tables of finished runs: the named ones of all directories, or those that each was made for."""
    from personafl.papers.catalog import find
    from personafl.papers.finished import tables_of, tables_of_preset
    from personafl.storage.rundir import resume_command

    parts = [tables_of(paths, *find(name))] if name else [tables_of_preset(path) for path in paths]
    for path in dict.fromkeys(path for _, unfinished in parts for path in unfinished):
        note(f"{path}: unfinished; continue with: {resume_command(path)}")
    return [table for tables, _ in parts for table in tables]


def _print(room: Any, found: Sequence[Any], form: Form) -> None:
    """Print what was found in a form; `room` has `markdown` and `rendered` of it."""
    if form == "markdown":
        print(room.markdown(found), end="")
    else:
        print_found([one.to_json() for one in found], room.rendered(found), form == "json")


def _list(as_json: bool) -> None:
    from personafl.papers.catalog import papers
    from personafl.papers.show import listing

    entries = [
        {"name": f"{paper.key}/{name}", "where": table.where, "title": table.title, "cite": paper.cite}
        for paper in papers().values()
        for name, table in paper.tables.items()
    ]
    print_found(entries, listing(), as_json)


def _paths(texts: list[str] | None) -> dict[str, Path]:
    paths = {}
    for text in texts or []:
        key, _, path = text.partition("=")
        if not (key and path):
            raise BadInput(f"--dataset {text}: write KEY=PATH, as in cifar10=data/cifar10.npz")
        paths[key] = Path(path)
    return paths


def _numbers(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(part) for part in listed(text) or []]
    except ValueError as error:
        raise BadInput(f"--seeds {text}: give numbers, as in 0,1,2") from error
