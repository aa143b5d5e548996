"""The description in the terminal and the SVG picture."""

from __future__ import annotations

import io
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from personafl.data.build import federate
from personafl.data.config import DataConfig
from personafl.data.describe import describe, sketch
from personafl.data.federated import FederatedData
from personafl.data.sources.dataset import checked
from personafl.errors import StorageFailed
from personafl.report.split import write_split

DEFAULT = DataConfig()


def toy(clients: int, classes: int, *, names: tuple[str, ...] = ()) -> FederatedData:
    label = np.tile(np.arange(classes), 20 * clients // classes + 1)
    dataset = checked("toy", name="toy <&>", x=np.zeros((len(label), 2)), y=label, label_names=names)
    chosen = {"partition": {"kind": "dirichlet", "clients": clients, "alpha": 0.2}, "unseen": 2, "validation": 0.1}
    return federate(dataset, DataConfig.model_validate(chosen), 0)


def printed(data: FederatedData, width: int = 80, config: DataConfig = DEFAULT) -> list[str]:
    buffer = io.StringIO()
    describe(data, Console(file=buffer, width=width), config)
    return buffer.getvalue().splitlines()


def test_terminal_names_the_facts() -> None:
    data = toy(12, 5)
    lines = printed(data)
    text = "\n".join(lines)
    assert "12 (10 seen, 2 unseen)" in text
    assert data.fingerprint[:16] in text
    assert "12 clients × 5 classes" in text
    assert f"{data.train.sizes.sum()}, per client min" in text
    assert sum("│" in line for line in lines) == 12
    assert sum(line.endswith("unseen") for line in lines) == 2
    assert max(map(len, lines)) <= 80


def test_terminal_fits_many_clients_and_classes() -> None:
    lines = printed(toy(300, 130), width=70)
    assert "30 of 300 clients × 130 classes, ordered by main class, 3 classes to a column" in " ".join(lines)
    assert sum("│" in line for line in lines) == 30
    assert max(map(len, lines)) <= 70


@pytest.mark.parametrize(("clients", "classes"), [(3, 2), (12, 5), (300, 130)])
def test_picture_is_well_formed_and_complete(tmp_path: Path, clients: int, classes: int) -> None:
    names = tuple(f"<{c}> & \x07" for c in range(classes))
    data = toy(clients, classes, names=names)
    write_split(data, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text("utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    for word in ("toy &lt;&amp;&gt;", "client", "class", "samples", data.fingerprint[:12], "unseen"):
        assert word in text
    assert "href" not in text
    if clients > 120:
        assert "120 of 300 clients" in text


@pytest.mark.parametrize(("clients", "classes"), [(12, 5), (300, 130)])
def test_sketch_has_the_shares_of_the_clients_it_names(clients: int, classes: int) -> None:
    data = toy(clients, classes)
    found = sketch(data)
    share = np.array(found["share"])
    counts = data.counts()[found["client"]]
    joined = -(-classes // 50)
    wanted = np.add.reduceat(counts, np.arange(0, classes, joined), axis=1) / counts.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(share, wanted, atol=6e-5)
    assert share.shape == (min(clients, 60), len(found["labels"]))
    assert found["names"] == [data.client_names[client] for client in found["client"]]


def test_picture_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match="cannot write the picture"):
        write_split(toy(3, 2), tmp_path / "missing" / "a.svg")


def rows(x: np.ndarray, y: np.ndarray, user: np.ndarray, **options: object) -> tuple[FederatedData, DataConfig]:
    config = DataConfig.model_validate(options)
    return federate(checked("here", name="rows", x=x, y=y, user=user), config, 0), config


def said(data: FederatedData, config: DataConfig = DEFAULT) -> str:
    return " ".join(" ".join(printed(data, 100, config)).split())


def test_what_will_hurt_is_said() -> None:
    """Four people; the third has one class, the fourth four samples; feature 1 never changes, feature 2 is in grams."""
    rng = np.random.default_rng(0)
    user = np.repeat([0, 1, 2, 3, 4], [50, 50, 50, 4, 1])
    x = rng.normal(size=(155, 3)) * [1, 0, 1000] + [0, 3, 70_000]
    y = np.where(user == 2, 1, np.arange(155) % 2)
    data, config = rows(x, y, user)
    text = said(data, config)
    assert "inputs standardised per feature (3), from sums over 4 clients' training data" in text
    assert "note: 1 client with fewer than 2 samples left out: 4" in text
    assert "1 of 3 features (1) never change" in text
    assert "1 of 4 clients (3) has fewer than 10 training samples" in text
    assert "1 of 4 clients (2) has one class only" in text
    assert "training may diverge" not in text
    raw = said(data, DataConfig(normalize="none"))
    assert "inputs as they are (data.normalize = none)" in raw
    assert 'training may diverge; set data.normalize = "auto"' in raw
    plain, _ = rows(rng.normal(size=(155, 3)), y, user)
    assert "diverge" not in said(plain, DataConfig(normalize="none"))


def test_label_skew_is_a_number_by_hand() -> None:
    """Mixes (1, 0), (0, 1), pooled (½, ½): each is ½(½ + ½) = ½ from it; dealt alike it is 0, whatever chance says."""
    x, user = np.random.default_rng(0).normal(size=(400, 2)), np.arange(400) // 200
    apart, _ = rows(x, user, user)
    assert (
        "are 0.50 from that of all (mean total variation; 0 alike, 1 nothing in common; dealt at random 0.03)"
        in said(apart)
    )
    assert "which personal methods are for" in said(apart)
    alike, _ = rows(x, np.arange(400) % 2, user)
    assert "are 0.00 from that of all" in said(alike)
    assert "little to gain" in said(alike)
