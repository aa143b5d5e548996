"""Charts: well-formed, points where the ticks say, nice ticks, and a legend in nobody's way."""

from __future__ import annotations

import math
import re
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from personafl.errors import StorageFailed
from personafl.report import Chart, Series, write_chart
from personafl.report.ticks import linear_axis, log_axis

Element = ElementTree.Element
NUMBERS = st.floats(-1e9, 1e9).filter(lambda value: value == 0 or abs(value) > 1e-6)


def chart(*series: Series, log_x: bool = False, title: str = "a", subtitle: str = "b") -> Chart:
    return Chart(title=title, subtitle=subtitle, x_title="x", y_title="y", series=series, log_x=log_x)


def drawn(picture: Chart) -> Element:
    return ElementTree.fromstring(picture.svg())


def of_class(root: Element, name: str) -> list[Element]:
    return [element for element in root.iter() if element.get("class") == name]


def number(text: str | None) -> float:
    return float((text or "").replace(",", "").replace("−", "-"))


def scale(root: Element, axis: str) -> tuple[list[float], list[float]]:
    """Return the values of an axis's ticks and their pixels."""
    ticks = of_class(root, f"{axis}-tick")
    return [number(tick.text) for tick in ticks], [number(tick.get(axis)) for tick in ticks]


def markers(root: Element) -> list[tuple[float, float]]:
    inside = [element for group in of_class(root, "series") for element in of_class(group, "marker")]
    return [(number(element.get("data-x")), number(element.get("data-y"))) for element in inside]


@pytest.mark.parametrize("log_x", [False, True])
def test_points_are_where_the_ticks_say(log_x: bool) -> None:
    x, y = [1.0, 40.0, 900.0, 25_000.0], [-3.0, 0.25, 7.0, 5.5]
    root = drawn(chart(Series(label="s", x=x, y=y), log_x=log_x))
    stretch = np.log if log_x else np.asarray
    for at, values, axis in ((0, stretch(x), "x"), (1, np.asarray(y), "y")):
        ticks, pixels = scale(root, axis)
        slope, start = np.polyfit(stretch(ticks) if axis == "x" else ticks, pixels, 1)
        shift = 3.5 if axis == "y" else 0.0  # a label's base line is below its middle
        np.testing.assert_allclose([point[at] for point in markers(root)], slope * values + start - shift, atol=0.15)


def test_lines_and_error_bars_go_through_the_points() -> None:
    series = Series(label="s", x=[0, 1, 2], y=[1.0, 3.0, 2.0], error=[0.5, 0.0, 1.0])
    root = drawn(chart(series))
    points = markers(root)
    line = of_class(of_class(root, "series")[0], "line")[0].get("d", "")
    corners = [tuple(map(float, pair.split())) for pair in line[1:].split("L")]
    np.testing.assert_allclose(corners, points, atol=0.06)
    ticks, pixels = scale(root, "y")
    per_unit = (pixels[0] - pixels[1]) / (ticks[1] - ticks[0])
    for bar, (x, y), half in zip(of_class(root, "error"), points, [0.5, 0.0, 1.0], strict=True):
        across, low, high = map(float, re.match(r"M([\d.]+) ([\d.]+)V([\d.]+)", bar.get("d", "")).groups())  # type: ignore[union-attr]
        np.testing.assert_allclose([across, low - y, y - high], [x, half * per_unit, half * per_unit], atol=0.2)


def test_what_is_not_asked_for_is_not_drawn() -> None:
    root = drawn(
        chart(
            Series(label="dots", x=[0, 1], y=[0, 1], line=False),
            Series(label="line", x=[0, 1, 2], y=[0, 1, math.nan], markers=False, dashed=True),
            Series(label="one", x=[1], y=[1]),
        )
    )
    counts = [
        [len(of_class(group, part)) for part in ("line", "marker", "error")] for group in of_class(root, "series")
    ]
    assert counts == [[0, 2, 0], [1, 0, 0], [0, 1, 0]]
    assert [line.get("stroke-dasharray") for line in of_class(of_class(root, "series")[1], "line")] == ["5 4"]


def test_the_file_is_well_formed_whatever_the_text_and_repeats(tmp_path: Path) -> None:
    odd = '<&> "quoted" \x07 é 日本'
    picture = chart(Series(label=odd, x=[1, 2], y=[3, 4]), title=odd, subtitle=odd)
    write_chart(picture, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text("utf-8")
    assert text == picture.svg()
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter() if element.text and "quoted" in element.text]
    assert words.count(odd.replace("\x07", "?")) == 4  # the title twice, the subtitle, the legend
    assert "href" not in text


def test_a_chart_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match="cannot write the picture"):
        write_chart(chart(Series(label="s", x=[1], y=[1])), tmp_path / "missing" / "a.svg")
    with pytest.raises(ValueError, match="needs a point"):
        chart(Series(label="s", x=[math.nan], y=[1])).svg()
    with pytest.raises(ValueError, match="shorter"):
        chart(Series(label="s", x=[1, 2], y=[1])).svg()
    with pytest.raises(ValueError, match="x = 0 cannot be shown"):
        chart(Series(label="s", x=[0, 1], y=[1, 2]), log_x=True).svg()


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=60), min_size=1, max_size=12))
def test_entries_of_the_legend_do_not_overlap_each_other_or_the_plot(labels: list[str]) -> None:
    root = drawn(chart(*(Series(label=label, x=[0, 1], y=[0, 1]) for label in labels)))
    texts = of_class(root, "legend")
    boxes = [(number(t.get("x")) - 30, number(t.get("x")) + 6 * len(t.text or ""), number(t.get("y"))) for t in texts]
    assert len(boxes) == len(labels)
    for one, other in combinations(boxes, 2):
        assert one[2] != other[2] or one[1] <= other[0] or other[1] <= one[0]
        assert one[2] == other[2] or abs(one[2] - other[2]) >= 15
    top = min(y for _, y in markers(root))
    assert max(y for _, _, y in boxes) < top - 20
    assert all(left >= 0 for left, _, _ in boxes)


@given(st.lists(NUMBERS, min_size=1, max_size=6))
def test_linear_ticks_are_nice(values: list[float]) -> None:
    axis = linear_axis(values)
    assert axis.low <= min(values)
    assert axis.high >= max(values)
    assert 2 <= len(axis.ticks) <= 8
    assert all(-1e-6 <= axis.place(tick) <= 1 + 1e-6 for tick in axis.ticks)
    steps = [right - left for left, right in pairwise(axis.ticks)]
    step = steps[0]
    assert steps == pytest.approx([step] * len(steps), rel=1e-3)
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert any(math.isclose(mantissa, nice, rel_tol=1e-3) for nice in (1, 2, 2.5, 5))
    assert len(set(axis.labels)) == len(axis.ticks)
    assert min(values) < 0 or axis.low >= 0


@given(st.floats(1e-6, 1e6), st.floats(1.0, 1e9))
def test_log_ticks_are_nice(low: float, factor: float) -> None:
    assume(low * factor < 1e12)
    axis = log_axis([low, low * factor])
    assert axis.low < low <= low * factor < axis.high
    assert 2 <= len(axis.ticks) <= 10
    assert all(-1e-6 <= axis.place(tick) <= 1 + 1e-6 for tick in axis.ticks)
    if factor > 10:
        for tick in axis.ticks:
            assert round(tick / 10 ** math.floor(math.log10(tick) + 1e-9), 6) in (1, 2, 5)
    assert axis.place(axis.low) == 0
    assert axis.place(axis.high) == pytest.approx(1)
    assert list(axis.ticks) == sorted(set(axis.ticks))


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 1], ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([-3, 12_000], ["0", "2,000", "4,000", "6,000", "8,000", "10,000", "12,000"]),
        ([5, 5], ["4.6", "4.8", "5", "5.2", "5.4"]),
        ([-1e-9, 4e-9], ["−1e−9", "0", "1e−9", "2e−9", "3e−9", "4e−9"]),
        ([2e11, 4e11], ["2e11", "2.5e11", "3e11", "3.5e11", "4e11"]),
        ([11_173_960, 11_173_980], ["11,173,960", "11,173,965", "11,173,970", "11,173,975", "11,173,980"]),
    ],
)
def test_labels(values: list[float], labels: list[str]) -> None:
    assert list(linear_axis(values).labels) == labels


def test_rounds_are_marked_at_whole_numbers() -> None:
    """From 1 to 4 a step of ½ would fit; y-values are not rounds, and keep theirs."""
    text = Chart(title="", x_title="", y_title="", series=[Series(label="", x=[1, 4], y=[1, 4])]).svg()
    assert re.findall(r'class="x-tick"[^>]*>(.*?)<', text) == ["1", "2", "3", "4"]
    assert "1.5" in re.findall(r'class="y-tick"[^>]*>(.*?)<', text)
