"""Folders of images: which folder is what, and every way in which they can be wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from personafl.core.reading import Reading
from personafl.data.sources import load_dataset
from personafl.errors import BadInput

image = pytest.importorskip("PIL.Image", reason="the images extra is not installed")
RNG = np.random.default_rng(0)


def draw(path: Path, *, size: tuple[int, int] = (6, 4), mode: str = "L") -> np.ndarray:
    """Write a random picture of a width and height; return its pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = size[::-1] if mode in ("L", "I;16") else (*size[::-1], 3)
    pixels = RNG.integers(0, 256, size=shape, dtype=np.uint16 if mode == "I;16" else np.uint8)
    image.fromarray(pixels).save(path)
    return pixels


def test_classes(tmp_path: Path) -> None:
    pixels = [draw(tmp_path / name) for name in ("cat/1.png", "cat/2.PNG", "dog/1.png")]
    (tmp_path / "README.txt").write_text("no image")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.png").write_bytes(b"")
    data = load_dataset(str(tmp_path))
    assert torch.equal(data.x, torch.from_numpy(np.stack(pixels)[:, None] / np.float32(255)))
    assert data.label_names == data.reading.classes == ("cat", "dog")
    assert data.y.tolist() == [0, 0, 1]
    assert data.user is None
    assert data.split is None


def test_new_images_need_no_class(tmp_path: Path) -> None:
    draw(tmp_path / "1.png")
    assert load_dataset(str(tmp_path), Reading(who="predict", classes=("cat", "dog"))).y.tolist() == [-1]
    with pytest.raises(BadInput, match=r"1\.png: is not where images are read from"):
        load_dataset(str(tmp_path))


def test_users_and_halves(tmp_path: Path) -> None:
    for name in ("train/ann/cat/1.jpg", "train/bob/dog/1.jpg", "test/ann/dog/1.png"):
        draw(tmp_path / name, mode="RGB")
    data = load_dataset(str(tmp_path))
    assert data.x.shape == (3, 3, 4, 6)
    assert data.user_names == ("ann", "bob")
    assert data.split is not None
    assert sorted(zip(data.split.tolist(), data.y.tolist(), strict=True)) == [(0, 0), (0, 1), (1, 1)]
    draw(tmp_path / "val" / "ann" / "cat" / "1.png")
    with pytest.raises(BadInput, match="has test and val; put the images of one of them into train"):
        load_dataset(str(tmp_path))


def test_one_picture_in_colour_makes_all_rgb_and_sizes_are_made_equal(tmp_path: Path) -> None:
    draw(tmp_path / "a" / "1.png")
    draw(tmp_path / "b" / "1.png", size=(9, 9), mode="RGB")
    with pytest.raises(BadInput, match=r"b/1\.png: is 9×9 and 1\.png 6×4 pixels; resize all with data\.size = 32"):
        load_dataset(str(tmp_path))
    assert load_dataset(str(tmp_path), Reading(size=5)).x.shape == (2, 3, 5, 5)


def test_bad_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw(tmp_path / "a" / "1.png")
    with pytest.raises(BadInput, match="every label is 'a', so that there is nothing to learn"):
        load_dataset(str(tmp_path))
    draw(tmp_path / "b" / "1.png")
    whole = (tmp_path / "b" / "1.png").read_bytes()
    for content in (b"no image", whole[: len(whole) // 2]):
        (tmp_path / "b" / "2.png").write_bytes(content)
        with pytest.raises(BadInput, match=r"b/2\.png: is damaged or no image .*remove or replace it") as caught:
            load_dataset(str(tmp_path))
        assert "\n" not in str(caught.value)
    draw(tmp_path / "b" / "2.png", mode="I;16")
    with pytest.raises(BadInput, match=r"b/2\.png: has pixels of kind I;16; save it with 8 bits per channel"):
        load_dataset(str(tmp_path))
    (tmp_path / "b" / "2.png").unlink()
    draw(tmp_path / "b" / "deep" / "2.png")
    with pytest.raises(BadInput, match=r"2\.png: is not where images are read from; use .*/USER/CLASS"):
        load_dataset(str(tmp_path))
    (tmp_path / "b" / "deep" / "2.png").unlink()
    monkeypatch.setattr("os.sysconf", lambda name: 10)
    with pytest.raises(BadInput, match=r"2 images of 6×4 pixels take 0 GiB of memory; resize them with data\.size"):
        load_dataset(str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(BadInput, match=r"needs pillow, pip install 'personafl\[images\]'"):
        load_dataset(str(tmp_path))
