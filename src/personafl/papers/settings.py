"""The settings of a preset's runs, key by key, beside those that its paper prints."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from personafl.models import MODELS
from personafl.options import defaults
from personafl.papers.catalog import Differs, Printed, Value
from personafl.papers.preset import Preset
from personafl.recipe.method import find_method
from personafl.recipe.recipe import Recipe
from personafl.recipe.values import flat

NOT_PRINTED = "not printed"
UNKNOWN = "data not here"  # in place of what only the data say
_OUR_OWN = {"name", "label", "seed", "start", "compare", "evaluation", "engine", "tracking", "deploy", "sweep"}

Settings = dict[str, Any]  # by key, as training.lr
_Reason = tuple[int, str, str]  # the number of the group that has it, its key, why
_Found = tuple[str, Value]  # where the paper has it, and what


@dataclass(frozen=True)
class Line:
    """A setting of some runs, ours and the paper's."""

    key: str
    runs: tuple[str, ...]  # that have it so; (): all, or of a method's option all that have it
    ours: str
    paper: str
    where: str  # in the paper; empty if it does not say
    why: str  # they differ, or ours is what it is where the paper says nothing; may be empty then
    wrong: bool  # they differ, and nobody says so


def settings_of(preset: Preset, recipe: Recipe, facts: Mapping[str, Settings]) -> dict[str, Settings]:
    """Return the settings of each run, with the defaults of methods and networks, and what is known of them besides."""
    return {run: _of_run(recipe.for_method(run, 0), recipe) | facts.get(run, {}) for run in preset.runs}


def compared(preset: Preset, settings: Mapping[str, Settings]) -> tuple[list[Line], list[str]]:
    """Return the settings that the preset gives or the paper prints, and what the preset wrongly says to differ."""
    printed = [group for group in preset.paper.printed if group.of_setting(preset.setting_name)]
    differing = preset.paper.differing(preset.setting_name, preset.size)
    given = set().union(*(_given(preset, run) for run in settings))
    used: set[tuple[int, str]] = set()
    lines: list[Line] = []
    for key in _keys(settings, given, printed):
        cells = {}
        for run, own in settings.items():
            found = _printed(printed, key, run, settings)
            if found is None and not (key in own and key in given):
                continue
            cells[run] = _cell(own.get(key), found, _reason(differing, key, run), used)
        lines += _joined(key, cells, len(settings))
    stale = [
        f"{key} is said to differ from the paper, and does not: {why}"
        for number, group in enumerate(differing)
        for key, why in group.why.items()
        if (number, key) not in used and any(map(group.of_run, settings))
    ]
    return lines, stale


def _cell(ours: Any, found: _Found | None, reason: _Reason | None, used: set[tuple[int, str]]) -> tuple[Any, ...]:
    """Return ours, paper, where, why and wrong for one run."""
    where, printed = found or ("", None)
    same = printed is not None and (ours == UNKNOWN or _equal(ours, printed.value, printed.within))
    why = ""
    if reason is not None and not same:
        group, key, why = reason
        used.add((group, key))
    shown = NOT_PRINTED if printed is None else _shown(printed)
    return text_of(ours), shown, where, why, printed is not None and not same and not why


def _joined(key: str, cells: Mapping[str, tuple[Any, ...]], every: int) -> Iterator[Line]:
    """Yield one line for all runs that agree."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for run, cell in cells.items():
        groups.setdefault(cell, []).append(run)
    for cell, runs in groups.items():
        ours, paper, where, why, wrong = cell
        whole = len(runs) == every or (len(groups) == 1 and key.startswith("method."))
        yield Line(key, () if whole else tuple(runs), ours, paper, where, why, wrong)


def _keys(settings: Mapping[str, Settings], given: set[str], printed: Sequence[Printed]) -> dict[str, None]:
    """Return the keys to show, in the order of a recipe; last what the paper prints and recipes have no key for."""
    wanted = given | {key for group in printed for key in group.values}
    ordered = dict.fromkeys(key for own in settings.values() for key in own if key in wanted)
    return ordered | dict.fromkeys(key for group in printed for key in group.values)


def _printed(groups: Sequence[Printed], key: str, run: str, settings: Mapping[str, Settings]) -> _Found | None:
    """Return what the paper prints for a run: the last that is about it.

    Where the paper does not say for which runs, it is about those that have the key, or about all if none has.
    """
    for group in reversed(groups):
        if key not in group.values or not group.of_run(run):
            continue
        if group.runs or key in settings[run] or not any(key in own for own in settings.values()):
            return group.where, group.values[key]
    return None


def _reason(groups: Sequence[Differs], key: str, run: str) -> _Reason | None:
    """Return why a key is another than the paper's: the reason with the longest key that it is below."""
    found: _Reason | None = None
    for number, group in enumerate(groups):
        for above, why in group.why.items():
            covers = group.of_run(run) and f"{key}.".startswith(f"{above}.")
            if covers and (found is None or len(above) >= len(found[1])):
                found = number, above, why
    return found


def _of_run(run: Recipe, whole: Recipe) -> Settings:
    values = run.model_dump(mode="json", exclude=_OUR_OWN)
    values["data"].pop("source")
    values["devices"] = [kind.model_dump(mode="json", exclude_defaults=True) for kind in run.devices]
    values["model"] = _with_defaults(MODELS.get(run.model.name), values["model"])
    values["method"] = _with_defaults(find_method(run.method.name, "method.name"), values["method"])
    if run.pretrain.rounds:
        build = find_method(run.pretrain.method.name, "pretrain.method.name")
        values["pretrain"]["method"] = _with_defaults(build, values["pretrain"]["method"])
    else:
        values.pop("pretrain")
    return _flat(values) | {"seeds": len(whole.compare.seeds)}


def _with_defaults(build: Any, values: dict[str, Any]) -> dict[str, Any]:
    return values if build is None else {**defaults(build), **values}


def _given(preset: Preset, run: str) -> set[str]:
    """Return the keys that the preset itself gives for a run."""
    values = preset.values()
    compare = values["compare"]
    variant = compare.get("variants", {}).get(run, {})
    options = compare.get("options", {}).get(variant.get("method", {}).get("name", run), {})
    common = {key: value for key, value in values.items() if key not in _OUR_OWN}
    keys = {key for part in (common, variant, {"method": options}) for key in _flat(part)}
    return {key for key in keys if key.partition(".")[0] not in _OUR_OWN} - {"data.source", "method.name"} | {"seeds"}


def _flat(values: Mapping[str, Any]) -> Settings:
    return {key: value for key, value in flat(values) if value is not None and value != []}


def _equal(ours: Any, paper: Any, within: float) -> bool:
    if paper is None:
        return False
    if isinstance(ours, int | float) and isinstance(paper, int | float) and not isinstance(ours, bool):
        return math.isclose(ours, paper, rel_tol=1e-9, abs_tol=within)
    if isinstance(ours, list | tuple) and isinstance(paper, list | tuple) and len(ours) == len(paper):
        return all(_equal(a, b, within) for a, b in zip(ours, paper, strict=True))
    return bool(ours == paper)


def _shown(value: Value) -> str:
    text = value.text or text_of(value.value)
    return text if value.how is None else f"{text} ({value.how})"


def text_of(value: Any) -> str:
    """Write a value as a reader would."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        text = f"{value:.6g}"
        return f"{text}.0" if text.isdigit() else text  # a cohort of 1.0 is everyone, one of 1 a single client
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} {text_of(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return ", ".join(map(text_of, value))
    return str(value)
