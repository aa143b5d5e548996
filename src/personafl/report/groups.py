"""Results by what clients have in common: the device profile, the server."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from personafl.report.cells import NONE, Cell, cells
from personafl.report.figure import Figure, View
from personafl.report.findings import Scored

KINDS = {"device": ("By device profile", "{}"), "server": ("By server", "server {}")}
Groups = dict[str, list[tuple[float, int]]]  # group -> its mean and number of clients under each seed


def group_figures(methods: Mapping[str, Scored]) -> list[Figure]:
    """Return a table of methods × groups for each way in which clients are grouped."""
    return [figure for kind in KINDS for figure in _figure(kind, list(methods.values()))]


def by_group(one: Scored, kind: str) -> Groups:
    """Return how a method's model does in each group of seen clients, in the order of the groups' names."""
    found: Groups = {}
    for seed, values in one.values.items():
        groups, known = np.array(one.column(seed, kind), dtype=np.str_), np.isfinite(values)
        for group in np.unique(groups[known]).tolist() if len(groups) else ():
            own = values[known & (groups == group)]
            found.setdefault(group, []).append((float(own.mean()), len(own)))
    return found


def _figure(kind: str, methods: Sequence[Scored]) -> Iterator[Figure]:
    title, words = KINDS[kind]
    found = {one.label: by_group(one, kind) for one in methods}
    found = {label: own for label, own in found.items() if own}
    groups = sorted({group for own in found.values() for group in own}, key=_natural)
    if len(groups) < 2:
        return
    measure = methods[0].measure
    means = {
        (label, g): statistics.mean(m for m, _ in seeds) for label, own in found.items() for g, seeds in own.items()
    }
    best = {group: max(measure.gain(mean) for (_, g), mean in means.items() if g == group) for group in groups}

    def cell(label: str, group: str) -> str | Cell:
        if (label, group) not in means:
            return NONE
        values, mean = [value for value, _ in found[label][group]], means[label, group]
        text = measure.written(mean, statistics.stdev(values) if len(values) > 1 else None)
        return Cell(text, "best") if measure.gain(mean) == best[group] else text

    heads = [f"{words.format(group)},\n{_counted(group, found.values())}" for group in groups]
    if len(groups) > len(found):  # the longer side goes down the page
        named = zip((head.replace("\n", " ") for head in heads), groups, strict=True)
        table = cells(title, [kind, *found], [[head, *(cell(label, g) for label in found)] for head, g in named])
    else:
        table = cells(
            title, ["method", *heads], [[label, *(cell(label, group) for group in groups)] for label in found]
        )
    caption = (
        f"{measure.title.capitalize()} of each method's model: mean over the seen clients of a group, of several seeds "
        "their mean ± standard deviation."
    )
    yield Figure(title=title, caption=caption, views=[View(chosen={}, picture=table)])


def _natural(name: str) -> str:
    """Return by what names are sorted: numbers as such."""
    return name.zfill(9) if name.isdigit() else name


def _counted(group: str, found: Iterable[Groups]) -> str:
    """Say how many clients a group has; it may depend on the seed."""
    counts = {count for own in found for _, count in own.get(group, [])}
    number = f"{min(counts):,}" if len(counts) == 1 else f"{min(counts):,} to {max(counts):,}"
    return f"{number} client{'' if counts == {1} else 's'}"
