"""Two comparisons of the same data side by side: the same methods in both, and what their recipes have otherwise."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from personafl.evaluate.paired import Paired
from personafl.report.cells import cells
from personafl.report.differences import SHARES, bars, compared
from personafl.report.figure import Figure, View
from personafl.report.findings import Scored, scored, told
from personafl.report.load import Source

Both = tuple[Scored, Scored, Paired]  # a method in the first source and in the second, which is compared with the first


def side_sentence(sources: Sequence[Source]) -> str:
    """Say for how many methods the second of two comparisons is better; empty if they have no run in common."""
    both = _in_both(sources)
    if not both:
        return ""
    first, second = (source.name for source in sources)
    if len(both) == 1:
        ((one, _, pair),) = both
        return f"{told(f'{one.label} in {second}', f'{one.label} in {first}', pair, one.measure)}."
    better = sum(pair.told_apart and pair.mean > 0 for _, _, pair in both)
    worse = sum(pair.told_apart and pair.mean < 0 for _, _, pair in both)
    level = len(both) - better - worse
    return (
        f"Of {len(both)} methods in both, {_many(better)} better in {second} than in {first}, {_many(worse)} worse"
        f"{f', {level} cannot be told apart' if level else ''}."
    )


def _many(count: int) -> str:
    return "none is" if count == 0 else "1 is" if count == 1 else f"{count} are"


def side_figures(sources: Sequence[Source]) -> list[Figure]:
    """Return the methods of two comparisons side by side, and the keys that their recipes have otherwise."""
    both = _in_both(sources)
    if not both:
        return []
    first, second = (source.name for source in sources)
    drawn = bars([pair for _, _, pair in both])
    lines = [
        [one.label, one.measure.written(one.mean), other.measure.written(other.mean), *compared(other, pair, bar)]
        for (one, other, pair), bar in zip(both, drawn, strict=True)
    ]
    titles = ["method", first, second, f"{second}\n− {first}", "interval", *SHARES]
    caption = (
        f"{both[0][0].measure.title.capitalize()} of the methods that both have, and the paired difference with its "
        "95 % interval: seen clients, in the seeds that both have. Pale: it holds 0."
    )
    changed = [
        [key, _word(ours), _word(theirs)] for key, ours, theirs in _changed(sources[0].recipe, sources[1].recipe)
    ]
    views = [View(chosen={}, picture=cells("Side by side", titles, lines))]
    figures = [Figure(title="The same methods in both", caption=caption, views=views)]
    if changed:
        table = cells("What differs", ["key", first, second], changed)
        words = "Keys of the two recipes whose values differ."
        figures.append(Figure(title="What differs", caption=words, views=[View(chosen={}, picture=table)]))
    return figures


def _in_both(sources: Sequence[Source]) -> list[Both]:
    if len(sources) != 2:
        return []
    finished = [{(run.plain, run.seed): run.result for run in source.runs if run.result} for source in sources]
    common = [pair for pair in finished[0] if pair in finished[1]]
    first, second = (scored([(label, part[label, seed]) for label, seed in common]) for part in finished)
    pairs = [(one, second[label]) for label, one in first.items() if label in second]
    return [(one, other, pair) for one, other in pairs if (pair := other.against(one)) is not None]


def _changed(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys whose values differ, and both values."""
    for key in dict.fromkeys([*one, *other]):
        ours, theirs = one.get(key), other.get(key)
        if isinstance(ours, dict) or isinstance(theirs, dict):
            yield from _changed(ours or {}, theirs or {}, f"{prefix}{key}.")
        elif ours != theirs:
            yield f"{prefix}{key}", ours, theirs


def _word(value: Any) -> str:
    return "not set" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
