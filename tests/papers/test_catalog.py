"""The papers' data: every preset is a recipe that can run, and claims and numbers are the papers' own."""

from pathlib import Path

import numpy as np
import pytest

from personafl.errors import BadInput
from personafl.papers import find, papers, presets
from personafl.papers.catalog import FOLDER, Claim, Table
from personafl.papers.preset import SIZES, Preset, named_by
from personafl.simulate.cohort import draw_cohort

TABLES = [(f"{paper.key}/{name}", table) for paper in papers().values() for name, table in paper.tables.items()]
PRESETS = [p for paper in papers().values() for size in SIZES for p in presets(paper, list(paper.tables), size)]
TEXTS = Path(__file__).resolve().parents[3] / "shared" / "papers"
FILES = {"fedalt": "fedalt-fedsim.txt", "fedslr": "fedslr.txt", "quped": "quped-arxiv.txt"}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_presets_are_recipes_whose_methods_exist(preset: Preset, tmp_path: Path) -> None:
    recipe = preset.recipe(given=dict.fromkeys(preset.paper.datasets, tmp_path))
    assert recipe.compare.methods == preset.runs
    for method in recipe.compare.methods:
        recipe.for_method(method, 0).algorithm()
    again = named_by(recipe)
    assert again is not None
    assert (again.paper.key, again.setting_name, again.size) == (preset.paper.key, preset.setting_name, preset.size)


@pytest.mark.parametrize(("name", "table"), TABLES)
def test_a_table_is_made_by_runs_or_says_what_shows_it(name: str, table: Table) -> None:
    assert (table.setting is None) == (table.instead is not None), name
    assert len({row.name for row in table.rows}) == len(table.rows)
    assert all((row.level is not None) == ((row.measure or table.measure) == "time-to") for row in table.rows)
    for row in table.rows if table.at else ():  # what is scored during training
        assert (row.measure or table.measure, row.minus) == ("accuracy", None), name


@pytest.mark.parametrize(("name", "table"), TABLES)
def test_claims_are_about_rows_and_agree_with_the_printed_numbers(name: str, table: Table) -> None:
    if table.setting is not None:
        assert table.claims, name
    rows = {row.name: row for row in table.rows}
    for claim in table.parsed_claims():
        more, less = rows[claim.more], rows[claim.less]
        if more.paper is not None and less.paper is not None:
            assert more.paper - less.paper + claim.margin >= -1e-9, f"{name}: the paper itself contradicts {claim.text}"


def test_the_numbers_are_printed_in_the_papers() -> None:
    if not TEXTS.is_dir():
        pytest.skip("the papers' texts are not beside this checkout (../shared/papers)")
    for name, table in TABLES:
        key = name.partition("/")[0]
        if key not in FILES or name == "fedalt/figure10":  # it has 256 and 193 of 1000 devices
            continue
        text = (TEXTS / FILES[key]).read_text()
        for row in table.rows:
            if row.paper is not None:
                assert f"{row.paper:.2f}" in text, f"{name}: {row.name} {row.paper:.2f}"


@pytest.mark.parametrize(
    ("text", "more", "less", "margin", "sign"),
    [
        ("A ≥ B", "A", "B", 0.0, 1),
        ("A ≤ B", "B", "A", 0.0, -1),
        ("β = 0.3, x ≥ Sync (y) − 0.5", "β = 0.3, x", "Sync (y)", 0.5, 1),
    ],
)
def test_claims_are_read(text: str, more: str, less: str, margin: float, sign: int) -> None:
    claim = Claim.parse(text)
    assert (claim.more, claim.less, claim.margin, claim.sign) == (more, less, margin, sign)


def test_what_is_no_claim() -> None:
    with pytest.raises(ValueError, match="a claim reads"):
        Claim.parse("A is better than B")


def test_names() -> None:
    assert find("fedslr/table1-cifar10")[1] == ["table1-cifar10"]
    assert find("quped/table8")[1] == ["table8-3", "table8-4"]
    assert len(find("fedbcd")[1]) == len(papers()["fedbcd"].tables)
    with pytest.raises(BadInput, match=r"no paper 'fedsrl'; did you mean 'fedslr'"):
        find("fedsrl")
    with pytest.raises(BadInput, match=r"fedslr has no 'tabel3'; did you mean 'table3'"):
        find("fedslr/tabel3")


def test_no_round_of_fedslrs_runs_has_an_empty_cohort(tmp_path: Path) -> None:
    """Every client takes part with probability 0.1, and the authors draw again when none does: here none need be."""
    (preset,) = presets(*find("fedslr/table1-cifar10"), "paper")
    recipe = preset.recipe(given={"cifar10": tmp_path})
    assert (recipe.federation.sampling, recipe.federation.size(100), recipe.rounds) == ("bernoulli", 10, 1000)
    sizes = [len(draw_cohort(np.arange(100), 10, "bernoulli", s, t)) for s in recipe.compare.seeds for t in range(1000)]
    assert min(sizes) > 0


def test_missing_data_say_where_they_come_from_and_what_they_must_contain(tmp_path: Path) -> None:
    (preset,) = presets(*find("fedslr/table3"), "paper")
    with pytest.raises(
        BadInput, match=r"'cifar100'.*cs\.toronto\.edu.*images, labels and split.*--dataset cifar100=PATH"
    ):
        preset.recipe()
    with pytest.raises(BadInput, match=r"has none of cifar100\.npz"):
        preset.recipe(tmp_path)
    with pytest.raises(BadInput, match=r"--dataset-dir: .*no such file or folder"):
        preset.recipe(tmp_path / "absent")
    with pytest.raises(BadInput, match="--dataset cifar: did you mean 'cifar10'"):
        preset.recipe(given={"cifar": tmp_path})
    (tmp_path / "cifar100").mkdir()
    (tmp_path / "cifar100" / "cifar100_5k.npz").touch()
    assert preset.recipe(tmp_path).data.source == str(tmp_path / "cifar100" / "cifar100_5k.npz")


def test_every_recipe_is_used() -> None:
    used = {setting.recipe for paper in papers().values() for setting in paper.settings.values()}
    assert used == {path.stem for path in (FOLDER / "recipes").glob("*.toml")}
