"""What was found, by results made up so that the numbers can be worked by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from personafl.report.cells import Cell, cells
from personafl.report.differences import difference_figures
from personafl.report.findings import behind, scored, sentence
from personafl.report.groups import by_group, group_figures
from personafl.report.measure import ACCURACY, Measure
from personafl.runs.result import Result


def made(method: str, seed: int = 0, split: str = "test", **models: Sequence[float | None]) -> tuple[str, Result]:
    """Return the result of a run: accuracies of its seen clients by model; other columns by their names."""
    scores = {name: list(values) for name, values in models.items() if name in ("global", "personal", "tuned")}
    count = len(next(iter(scores.values())))
    rows = [{"method": method, "seed": seed, "model": name, "clients": "seen", "split": split} for name in scores]
    columns: dict[str, list[Any]] = {"name": list("abcdefgh"[:count]), "clients": ["seen"] * count}
    columns |= {f"{name}_{split}_accuracy": values for name, values in scores.items()}
    columns |= {name: list(values) for name, values in models.items() if name not in scores}
    return method, Result(Path(method), rows, columns, 0.0)


# Four clients: 2 points better, on average, with differences 1, 2, 2, 3: standard deviation √(2/3) = 0.8165, and
# t of 3 degrees of freedom is 3.1824, so ± 3.1824·0.8165/2 = 1.299.
FEDAVG = made("fedavg", **{"global": [0.80, 0.70, 0.60, 0.90]})
DITTO = made("ditto", **{"global": [0.5] * 4, "personal": [0.81, 0.72, 0.62, 0.93]})
# Differences -1, 0, 0, 3 to fedavg: mean 0.5, standard deviation √3 = 1.732, so ± 2.756.
LOCAL = made("local", personal=[0.79, 0.70, 0.60, 0.93])


def test_the_best_method_beats_fedavg() -> None:
    assert sentence([LOCAL, FEDAVG, DITTO]) == (
        "ditto (personal) beats fedavg (global) by 2.0 ± 1.3 points (95%), paired over clients; "
        "0% of clients are worse off with ditto."
    )


def test_without_fedavg_the_best_is_compared_with_local_and_else_with_the_second() -> None:
    near = made("apfl", personal=[0.81, 0.72, 0.62, 0.91])
    assert sentence([near, LOCAL, DITTO]).startswith(
        "ditto (personal) and local (personal) cannot be told apart: 1.5 ±"
    )
    far = made("fedalt", personal=[0.1] * 4)
    assert sentence([far, near, DITTO]).startswith("ditto (personal) and apfl (personal) cannot be told apart: 0.5 ±")


def test_fedavg_may_be_the_best_itself() -> None:
    worse = made("local", personal=[0.79, 0.68, 0.58, 0.87])
    assert sentence([worse, FEDAVG]).startswith("fedavg (global) beats local (personal) by 2.0 ± 1.3 points")


def test_an_interval_with_0_in_it_tells_nothing_apart() -> None:
    assert sentence([FEDAVG, LOCAL]) == (
        "local (personal) and fedavg (global) cannot be told apart: 0.5 ± 2.8 points (95%), paired over clients; "
        "25% of clients are worse off with local."
    )


def test_several_seeds_are_named_and_only_those_that_both_have_count() -> None:
    """Under both seeds the same differences: seed means are equal, so clients alone make the interval, ± 1.299."""
    later = made("fedavg", 1, **{"global": [0.5] * 4}), made("ditto", 1, personal=[0.51, 0.52, 0.52, 0.53])
    unpaired = made("ditto", 2, personal=[0.9] * 4)
    assert sentence([FEDAVG, DITTO, *later, unpaired]).startswith(
        "ditto (personal) beats fedavg (global) by 2.0 ± 1.3 points (95%), paired over clients and seeds;"
    )


def test_one_method_is_compared_with_its_own_global_model() -> None:
    run = made("ditto", **{"global": [0.81, 0.70, 0.60, 0.90], "personal": [0.80, 0.75, 0.65, 0.95]})
    assert sentence([run]) == (
        "ditto (personal) and ditto (global) cannot be told apart: 3.5 ± 4.8 points (95%), paired over clients; "
        "25% of clients are hurt."
    )
    hurt = made("ditto", **{"global": [0.80, 0.70, 0.60, 0.90], "personal": [0.79, 0.68, 0.58, 0.87]})
    assert sentence([hurt]) == (
        "ditto (global) beats ditto (personal) by 2.0 ± 1.3 points (95%), paired over clients; "
        "100% of clients are hurt."
    )
    assert sentence([FEDAVG]) == sentence([]) == ""


def test_a_tuned_model_is_the_last_one() -> None:
    tuned = made("fedalt", **{"global": [0.1] * 4, "personal": [0.2] * 4, "tuned": [0.81, 0.72, 0.62, 0.93]})
    assert sentence([FEDAVG, tuned]).startswith("fedalt (tuned) beats fedavg (global) by 2.0")


# Differences to fedavg −1, −2, −2, −3: 2 points below, ± 1.3; to its own global model −3, −2, −2, −3: 2.5 ± 3.1824/√12.
QUPED = made("quped", **{"global": [0.82, 0.70, 0.60, 0.90], "personal": [0.79, 0.68, 0.58, 0.87]})


def test_who_is_behind_the_better_baseline_is_said_with_what_to_do() -> None:
    """Local training is 0.5 points above FedAvg, but 6 to 9 points lower in the second case."""
    sized = made("quped", **{"global": [0.8] * 4, "personal": [0.79, 0.68, 0.58, 0.87]}, train=[9, 40, 10, 12])
    poor = made("local", personal=[0.7, 0.6, 0.5, 0.8])
    assert behind([FEDAVG, sized, DITTO, poor]) == [
        "quped: clients' own models are 2.0 ± 1.3 points below fedavg (global), and worse for 100% of clients, who "
        "have 11 training samples in the median; with data.validation=0.2 each client keeps its own model only where "
        "that is shown to be better"
    ]
    better = made("local", personal=[0.82, 0.72, 0.62, 0.92])
    assert behind([better, sized, FEDAVG])[0].startswith(
        "quped: clients' own models are 4.0 ± 1.3 points below local ("
    )


def test_a_single_method_is_held_to_its_own_global_model_and_few_points_are_not_said() -> None:
    assert behind([QUPED])[0].startswith("quped: clients' own models are 2.5 ± 0.9 points below quped (global), and")
    assert behind([FEDAVG, DITTO]) == behind([LOCAL, FEDAVG]) == behind([FEDAVG]) == behind([]) == []
    near = made("apfl", personal=[0.797, 0.696, 0.596, 0.895])  # 0.3 to 0.5 points below, which is told apart
    assert behind([FEDAVG, near]) == []
    scattered = made("apfl", personal=[0.99, 0.50, 0.40, 0.95])  # −9 on average, ± 25
    assert behind([FEDAVG, scattered]) == []


def test_chosen_models_that_are_not_behind_are_the_remedy() -> None:
    """Means: fedavg 75.0 %, its rival 73.0 %; chosen ones of 74.5 % are within a point, and of 73.5 % are not."""
    for chosen, remedy in (
        (0.745, "the models chosen by validation data have 74.5 %: keep those"),
        (0.735, "take fedavg"),
    ):
        run = made("quped", **{"global": [0.1] * 4, "personal": [0.79, 0.68, 0.58, 0.87]})
        row = {"method": "quped", "seed": 0, "model": "chosen", "clients": "seen", "split": "test", "accuracy": chosen}
        run[1].rows.append(row)
        assert f"; {remedy}" in behind([FEDAVG, run])[0]
    whole = made("binaryrelax", personal=[0.79, 0.68, 0.58, 0.87])  # it has no global model to fall back on
    assert behind([FEDAVG, whole])[0].endswith(
        "; take fedavg, or tune the method by validation data (personafl compare --tune 12)"
    )


def test_clients_without_a_score_and_unread_test_data() -> None:
    """The third client has no samples: differences 1, 2, 3, as a mean 2.0 ± 4.3027/√3 = 2.5."""
    one = made("fedavg", split="validation", **{"global": [0.80, 0.70, None, 0.90]})
    other = made("ditto", split="validation", personal=[0.81, 0.72, None, 0.93])
    assert "cannot be told apart: 2.0 ± 2.5 points" in sentence([one, other])


def test_a_single_client_has_no_interval() -> None:
    found = sentence([made("fedavg", **{"global": [0.5]}), made("ditto", personal=[0.52])])
    assert found.startswith("ditto (personal) is 2.0 points above fedavg (global), for a single client;")


def test_of_an_error_the_smaller_is_better() -> None:
    error = Measure(key="accuracy", title="error", unit="cm", digits=2, larger_is_better=False)
    methods = scored([FEDAVG, DITTO], measure=error)
    assert list(methods) == ["fedavg", "ditto"]
    pair = methods["fedavg"].against(methods["ditto"])
    assert pair is not None
    assert pair.mean == pytest.approx(0.02)
    assert error.change(pair.mean, pair.half) == "+0.02 ± 0.01"
    assert error.written(0.75, 0.125) == "0.75 ± 0.12"


def test_a_change_has_its_sign() -> None:
    assert [ACCURACY.change(value) for value in (1.25, -3.0, -0.04, 0.0)] == ["+1.2", "−3.0", "0.0", "0.0"]


def shown(picture: str) -> list[list[str]]:
    """Return the texts of a table's cells, without pictures."""
    plain = re.sub(r"<svg.*?</svg>", "", picture, flags=re.DOTALL)
    return [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line, re.DOTALL)
        for line in re.findall(r"<tr>(.*?)</tr>", plain, re.DOTALL)
    ]


def test_all_methods_are_compared_with_each() -> None:
    (figure,) = difference_figures(scored([FEDAVG, DITTO, LOCAL]))
    assert [view.chosen["against"] for view in figure.views] == ["fedavg", "ditto", "local"]
    against = {view.chosen["against"]: shown(view.picture)[1:] for view in figure.views}
    assert against["fedavg"] == [
        ["ditto (personal)", "+2.0 ± 1.3", "", "100%", "0%"],
        ["local (personal)", "+0.5 ± 2.8", "", "25%", "25%"],
    ]
    assert against["ditto"][0] == ["local (personal)", "−1.5 ± 1.6", "", "0%", "75%"]
    assert against["ditto"][1] == ["fedavg (global)", "−2.0 ± 1.3", "", "0%", "100%"]
    assert figure.views[0].picture.count("pale") == 4  # the cells of the one that holds 0
    assert difference_figures(scored([DITTO])) == []


def test_groups_are_means_over_their_clients_then_over_seeds() -> None:
    """Phones: (0.8 + 0.7)/2 = 75 % and (0.6 + 0.7)/2 = 65 %: 70.0 ± 10/√2; the watch: 60 % and 50 %, 55.0 ± 7.1."""
    runs = [
        made("ditto", seed, personal=values, device=["phone", "phone", "watch"])
        for seed, values in ((0, [0.8, 0.7, 0.6]), (1, [0.6, 0.7, 0.5]))
    ]
    assert by_group(scored(runs)["ditto"], "device")["phone"] == [
        (pytest.approx(0.75), 2),
        (pytest.approx(0.65), 2),
    ]
    (figure,) = group_figures(scored(runs))
    assert figure.title == "By device profile"
    assert shown(figure.views[0].picture) == [
        ["device", "ditto"],
        ["phone, 2 clients", "70.0 ± 7.1"],
        ["watch, 1 client", "55.0 ± 7.1"],
    ]


def test_the_longer_side_of_groups_goes_down_and_the_best_is_marked() -> None:
    servers: Mapping[str, Any] = {"server": [10, 2, 2, 2]}
    runs = [
        made(name, personal=[0.5, 0.6, 0.6, value], **servers) for name, value in (("a", 0.3), ("b", 0.6), ("c", 0.9))
    ]
    (figure,) = group_figures(scored(runs))
    assert shown(figure.views[0].picture) == [
        ["method", "server 2,\n3 clients", "server 10,\n1 client"],
        ["c", "70.0", "50.0"],
        ["b", "60.0", "50.0"],
        ["a", "50.0", "50.0"],
    ]
    assert figure.views[0].picture.count('class="best"') == 4
    assert group_figures(scored([made("a", personal=[0.1, 0.2], device=["one", "one"])])) == []
    assert group_figures(scored([FEDAVG])) == []


def test_cells_are_not_markup() -> None:
    text = cells("<a>", ["<b>", "<c>\nd"], [["<e>", "<f>"], ["g", Cell("<h>", "best")]])
    assert not re.findall(r"<[a-h]>", text)
    assert 'data-label="&lt;c&gt; d"' in text
