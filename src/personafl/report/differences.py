"""All methods against each other: paired differences with their intervals, by the method that one compares with."""

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from personafl.evaluate.paired import Paired
from personafl.report.cells import Cell, cells
from personafl.report.figure import Choice, Figure, View
from personafl.report.findings import Scored, rival_of
from personafl.report.measure import share
from personafl.report.ticks import linear_axis

SHARES = ("clients\nbetter", "clients\nworse")  # titles of columns
BAR = 180.0  # pixels of an interval's picture
CAPTION = (
    "Mean difference on seen clients, its 95 % interval, and the shares of clients that are better and worse off. "
    "Under a seed all methods have the same clients and data, so each client is compared with itself; the interval "
    "allows for other clients and other seeds. Pale: it holds 0. Of many comparisons one in 20 leaves it out by chance."
)


def difference_figures(methods: Mapping[str, Scored]) -> list[Figure]:
    """Return the figure of differences between methods, the best first; for one method there is none."""
    if len(methods) < 2:
        return []
    pairs = _pairs(methods)
    ranked = list(methods)
    first = rival_of(ranked[0], ranked)
    words = {label: label for label in [first, *(label for label in ranked if label != first)]}
    views = [
        View(chosen={"against": label}, picture=_table(methods[label], list(methods.values()), pairs))
        for label in words
        if any(other == label for _, other in pairs)
    ]
    if not views:
        return []
    choices = (Choice.of("against", "compared with", words, views),)
    return [Figure(title="Each method's model against another's", caption=CAPTION, views=views, choices=choices)]


def _pairs(methods: Mapping[str, Scored]) -> dict[tuple[str, str], Paired]:
    """Return all that can be compared, both ways round."""
    found: dict[tuple[str, str], Paired] = {}
    ranked = list(methods.values())
    for at, one in enumerate(ranked):
        for other in ranked[at + 1 :]:
            if (pair := one.against(other)) is not None:
                found[one.label, other.label], found[other.label, one.label] = pair, -pair
    return found


def _table(against: Scored, methods: Sequence[Scored], pairs: Mapping[tuple[str, str], Paired]) -> Markup:
    title = f"− {against.label},\n{against.measure.unit}"
    shown = [(one, pairs[one.label, against.label]) for one in methods if (one.label, against.label) in pairs]
    drawn = bars([pair for _, pair in shown])
    lines = [[one.name, *compared(one, pair, bar)] for (one, pair), bar in zip(shown, drawn, strict=True)]
    return cells(f"Differences to {against.name}", ["method", title, "interval", *SHARES], lines)


def compared(one: Scored, pair: Paired, bar: Markup) -> list[str | Cell]:
    """Return the cells of a comparison: the difference, its picture, and who is better or worse off."""
    pale = "" if pair.told_apart else " pale"
    return [
        Cell(one.measure.change(pair.mean, pair.half), f"gain{pale}"),
        Cell(bar, f"bar{pale}"),
        Cell(share(pair.better), f"share{pale}"),
        Cell(share(pair.worse), f"share{pale}"),
    ]


def bars(pairs: Sequence[Paired]) -> list[Markup]:
    """Draw intervals on one axis, each beside a line at 0; the numbers in the cells say the same."""
    spans = [(pair.mean - pair.half, pair.mean + pair.half) if pair.half == pair.half else () for pair in pairs]
    axis = linear_axis([0.0, *(pair.mean for pair in pairs), *(end for span in spans for end in span)])

    def at(value: float) -> str:
        return f"{6 + (BAR - 12) * axis.place(value):.0f}"

    lines = [f'<path class="line" d="M{at(span[0])} 8H{at(span[1])}"/>' if span else "" for span in spans]
    return [
        Markup(
            f'<svg class="interval" viewBox="0 0 {BAR:.0f} 16" aria-hidden="true">'
            f'<path class="zero" d="M{at(0.0)} 0v16"/>{line}<circle cx="{at(pair.mean)}" cy="8" r="3.5"/></svg>'
        )
        for pair, line in zip(pairs, lines, strict=True)
    ]
