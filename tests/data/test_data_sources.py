"""Every source, on small files made here, and every way in which they can be wrong."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import pickle
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from personafl.core.reading import Reading
from personafl.core.rng import numpy_generator
from personafl.data.sources import SOURCES, load_dataset
from personafl.errors import BadInput

RNG = numpy_generator(0, "source tests")


def pixels(*shape: int) -> NDArray[np.uint8]:
    return RNG.integers(0, 256, size=shape, dtype=np.uint8)


def save(path: Path, **arrays: Any) -> Path:
    np.savez_compressed(path, **arrays)
    return path


# --- npz ---------------------------------------------------------------------------------------------------------


def test_npz_images(tmp_path: Path) -> None:
    images = pixels(6, 5, 4)
    path = save(
        tmp_path / "a.npz",
        images=images,
        labels=np.array([0, 1, 2, 0, 1, 2], np.uint8),
        user=np.array([5, 5, 7, 7, 9, 9]),
        split=np.array([0, 1, 0, 1, 0, 1]),
        class_name=np.array(["cat", "dog", "owl"]),
    )
    data = load_dataset(str(path))
    assert data.name == "a"
    assert data.x.dtype == torch.float32
    assert np.array_equal(data.x.numpy(), (images[:, None] / np.float32(255)).astype(np.float32))
    assert data.y.tolist() == [0, 1, 2, 0, 1, 2]
    assert data.classes == 3
    assert data.label_names == ("cat", "dog", "owl")
    assert data.user is not None
    assert data.user.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.user_names == ("5", "7", "9")
    assert data.split is not None
    assert data.vocabulary is None


def test_npz_layouts(tmp_path: Path) -> None:
    y = np.array([0, 1])
    for shape, expected in {
        (2, 8, 9, 3): (2, 3, 8, 9),
        (2, 3, 8, 9): (2, 3, 8, 9),
        (2, 8, 9): (2, 1, 8, 9),
        (2, 7): (2, 7),
    }.items():
        assert tuple(load_dataset(str(save(tmp_path / "b.npz", x=pixels(*shape), y=y))).x.shape) == expected
    floats = RNG.normal(size=(2, 4, 5))
    kept = load_dataset(str(save(tmp_path / "c.npz", x=floats, y=y)))
    assert np.array_equal(kept.x.numpy(), floats.astype(np.float32))
    tokens = load_dataset(str(save(tmp_path / "d.npz", x=np.array([[1, 2], [8, 0]]), y=np.array([[0, 1], [1, -1]]))))
    assert tokens.x.dtype == torch.int64
    assert tokens.vocabulary == 9
    assert tokens.y.shape == (2, 2)
    named = load_dataset(str(save(tmp_path / "e.npz", x=floats, y=y, user=np.array(["zoe", "al"]))))
    assert named.user_names == ("al", "zoe")


def flat(texts: list[str]) -> dict[str, NDArray[Any]]:
    pieces = [text.encode() for text in texts]
    return {
        "text": np.frombuffer(b"".join(pieces), np.uint8),
        "offset": np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]),
    }


def test_npz_text_is_hashed_words(tmp_path: Path) -> None:
    path = save(tmp_path / "t.npz", **flat(["Hello, WORLD", "a b c d e", "ünï"]), labels=np.array([0, 1, 1]))
    data = load_dataset(str(path), Reading(length=4, vocabulary=50))
    assert data.x.shape == (3, 4)
    assert data.x[0].tolist() == [1 + zlib.crc32(word) % 49 for word in (b"hello", b"world")] + [0, 0]
    assert (data.x[1] > 0).all()
    assert data.x[2, 0] == 1 + zlib.crc32("ünï".encode()) % 49
    assert data.vocabulary == 50


def test_npz_text_without_labels_predicts_the_next_character(tmp_path: Path) -> None:
    """'abcab' in windows of 2 gives ab→bc, ca→ab; 'b' has nothing to predict; 'cc ' gives cc→c␠."""
    path = save(tmp_path / "s.npz", **flat(["abcab", "b", "cc "]), user_name=np.array(["A", "B", "C"]))
    data = load_dataset(str(path), Reading(length=2))
    assert data.label_names == ("space", "a", "b", "c")
    assert data.classes == data.vocabulary == 4
    assert data.x.tolist() == [[1, 2], [3, 1], [3, 3]]
    assert data.y.tolist() == [[2, 3], [1, 2], [3, 0]]
    assert data.user_names == ("A", "C")
    longer = load_dataset(str(path), Reading(length=3))
    assert longer.x.tolist() == [[1, 2, 3], [1, 0, 0], [3, 3, 0]]
    assert longer.y.tolist() == [[2, 3, 1], [2, -1, -1], [3, 0, -1]]


GOOD: dict[str, Any] = {"x": np.zeros((4, 3)), "y": np.array([0, 1, 0, 1])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((0, 3)), "y": np.zeros(0, int)}, "holds no samples"),
        ({"x": np.zeros((5, 3))}, "5 samples but 4 labels"),
        ({"x": np.zeros(4)}, r"x has shape \[4\]"),
        ({"x": np.array([[0.0], [np.nan], [1], [2]])}, "sample 1 holds NaN or infinity"),
        ({"x": np.array([[0.0], [1], [np.inf], [2]])}, "sample 2 holds NaN or infinity"),
        ({"x": np.array([[1e300], [1], [1], [2]])}, "sample 0 holds NaN or infinity"),
        ({"x": np.zeros((4, 3), complex)}, "x has dtype complex128"),
        ({"x": np.full((4, 3), -1)}, "token -1 in x is negative"),
        ({"x": np.zeros((4, 2, 2, 2, 2), np.uint8)}, r"images of shape \[4, 2, 2, 2, 2\]"),
        ({"y": np.array([0, 1, -2, 1])}, r'label -2 is negative.*or else .*data\.classes = \["-2", "0", "1"\]'),
        ({"y": np.array([0.5, np.inf, 0, 1])}, r"the target of sample 1 is \[inf\], and 1 of 4 are no finite numbers"),
        ({"y": np.array([0.5, 0.5, 0.5, 0.5])}, "target is 0.5 everywhere, so that there is nothing to learn"),
        ({"y": np.array([0.0, np.nan, np.nan, 1])}, "2 of 4 labels are missing; remove these samples"),
        ({"y": np.array(["a", "", "b", "a"])}, "1 of 4 labels are empty; remove these samples"),
        ({"y": np.zeros(4, "datetime64[s]")}, "labels of dtype datetime64"),
        ({"x": np.zeros((50, 2)), "y": np.arange(50) * 3}, "50 different labels in 50 samples, such as 0 and 3; name"),
        ({"y": np.zeros(4, int)}, "every label is '0', so that there is nothing to learn; check"),
        ({"user": np.array([0, np.nan, 0, 1])}, "user is missing in 1 of 4 samples; remove or name"),
        ({"y": np.array(1)}, "labels"),
        ({"class_name": np.array(["only"])}, "label 1 is out of range, there are 1 class names"),
        ({"y": np.full((4, 2), -1)}, "every label is -1"),
        ({"user": np.array([0, 1])}, "user has dtype"),
        ({"user": np.array([0, -1, 0, 0])}, "user -1 is negative"),
        ({"user": np.array([0, 3, 0, 0]), "user_name": np.array(["a"])}, "user 3 is out of range"),
        ({"split": np.array([0, 2, 0, 1])}, "split must hold 0"),
        ({"split": np.ones(4, int)}, "split marks every sample as test"),
        ({"y": np.array([None, {}, 1, 2], dtype=object)}, "pickled objects are refused"),
    ],
)
def test_bad_npz(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = save(tmp_path / "bad.npz", **{**GOOD, **change})
    with pytest.raises(BadInput, match=message) as caught:
        load_dataset(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": np.zeros(3, np.int64)}, "text has dtype int64"),
        ({"offset": np.array([0, 9])}, "offset must be integers rising from 0 to 3"),
        ({"offset": np.array([0.0, 3.0])}, "offset must be integers"),
        ({"offset": np.array([0, 2, 1, 3])}, "offset must be integers"),
        ({"text": np.zeros(0, np.uint8), "offset": np.array([0, 0])}, "text is empty"),
        ({"user": np.array([1, 2, 3])}, r"user has shape \[3\]"),
        ({"labels": np.array([0, 1])}, "1 samples but 2 labels"),
    ],
)
def test_bad_text_npz(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = save(tmp_path / "bad.npz", **{**flat(["abc"]), **change})
    with pytest.raises(BadInput, match=message):
        load_dataset(str(path))


def test_damaged_npz(tmp_path: Path) -> None:
    path = save(tmp_path / "cut.npz", x=RNG.normal(size=(50, 9)), y=np.zeros(50, int))
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:size])
        with pytest.raises(BadInput, match=r"cut\.npz: cannot be read, truncated"):
            load_dataset(str(path))
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 0xFF
    path.write_bytes(flipped)
    with pytest.raises(BadInput, match=r"cut\.npz"):
        load_dataset(str(path))
    save(path, a=np.zeros(3))
    with pytest.raises(BadInput, match=r"has arrays \(none\); needs x, images or features"):
        load_dataset(str(path))
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(BadInput, match="single array"):
        load_dataset(str(path))


# --- idx ---------------------------------------------------------------------------------------------------------


def idx(array: NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def mnist(folder: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    images, labels = pixels(7, 4, 5), np.array([0, 1, 2, 0, 1, 2, 1], np.uint8)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images[:5])))
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels[:5])))
    (folder / "t10k-images-idx3-ubyte").write_bytes(idx(images[5:]))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(labels[5:]))
    return images, labels


def test_idx(tmp_path: Path) -> None:
    images, labels = mnist(tmp_path)
    data = load_dataset(str(tmp_path))
    assert data.split is not None
    order = np.argsort(data.split, kind="stable")
    assert np.array_equal((data.x.numpy()[order, 0] * 255).round(), images)
    assert data.y.numpy()[order].tolist() == labels.tolist()
    assert data.split.sum() == 2
    half = load_dataset(str(tmp_path / "train-images-idx3-ubyte.gz"))
    assert len(half.x) == 5
    assert half.split is None
    assert half.name == "train"


def test_bad_idx(tmp_path: Path) -> None:
    mnist(tmp_path)
    images = tmp_path / "train-images-idx3-ubyte.gz"
    whole = images.read_bytes()
    images.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInput, match=r"train-images-idx3-ubyte\.gz: cannot be read"):
        load_dataset(str(tmp_path))
    images.write_bytes(gzip.compress(gzip.decompress(whole)[:-3]))
    with pytest.raises(BadInput, match="truncated, 97 of 100 bytes"):
        load_dataset(str(tmp_path))
    images.write_bytes(gzip.compress(b"hello"))
    with pytest.raises(BadInput, match="not an idx file"):
        load_dataset(str(tmp_path))
    images.write_bytes(gzip.compress(idx(pixels(4, 4, 5))))
    with pytest.raises(BadInput, match="4 images but 5 labels"):
        load_dataset(str(tmp_path))
    with pytest.raises(BadInput, match="is not an idx image file"):
        load_dataset(str(tmp_path / "train-labels-idx1-ubyte.gz"))
    (tmp_path / "letters-train-images-idx3-ubyte").write_bytes(idx(pixels(4, 4, 5)))
    with pytest.raises(BadInput, match="several data sets"):
        load_dataset(str(tmp_path))
    (tmp_path / "letters-train-images-idx3-ubyte").unlink()
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(BadInput, match=r"its labels t10k-labels-idx1-ubyte\[\.gz\] are missing"):
        load_dataset(str(tmp_path))


# --- CIFAR -------------------------------------------------------------------------------------------------------


def python2_batch(data: NDArray[np.uint8], labels: list[int], key: bytes = b"labels") -> bytes:
    """Write a batch as Python 2's cPickle did: byte-string keys, numpy.core.multiarray._reconstruct."""

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    def integer(value: int) -> bytes:
        return b"J" + value.to_bytes(4, "little", signed=True)

    raw = data.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + b"K\x00\x85" + short(b"b") + b"\x87R"
        b"(K\x01" + integer(data.shape[0]) + integer(data.shape[1]) + b"\x86"
        b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R"
        b"(K\x03" + short(b"|") + b"NNN" + integer(-1) + integer(-1) + b"K\x00tb"
        b"\x89" + b"T" + len(raw).to_bytes(4, "little") + raw + b"tb"
    )
    items = short(b"data") + array + short(key) + b"](" + b"".join(map(integer, labels)) + b"e"
    return b"\x80\x02}(" + items + b"u."


def test_cifar10_as_published(tmp_path: Path) -> None:
    images = pixels(9, 3072)
    for number in range(4):
        name = f"data_batch_{number + 1}"
        (tmp_path / name).write_bytes(python2_batch(images[2 * number : 2 * number + 2], [number, 1]))
    (tmp_path / "test_batch").write_bytes(python2_batch(images[8:], [2]))
    names = [b"plane", b"car", b"bird", b"cat"]
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({b"label_names": names}, protocol=2))
    data = load_dataset(str(tmp_path))
    assert np.array_equal((data.x.numpy() * 255).round(), images.reshape(9, 3, 32, 32))
    assert data.y.tolist() == [0, 1, 1, 1, 2, 1, 3, 1, 2]
    assert data.split is not None
    assert data.split.tolist() == [0] * 8 + [1]
    assert data.label_names == ("plane", "car", "bird", "cat")


def test_cifar100_pickled_by_python3(tmp_path: Path) -> None:
    for name, count in (("train", 3), ("test", 2)):
        batch = {"data": pixels(count, 3072), "fine_labels": list(range(count)), "coarse_labels": [0] * count}
        (tmp_path / name).write_bytes(pickle.dumps(batch, protocol=2))
    data = load_dataset(str(tmp_path))
    assert data.classes == 3
    assert len(load_dataset(str(tmp_path / "train")).x) == 3


class Attack:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("content", "asks"),
    [
        (Attack(os.system, "exit 1"), r"(posix|nt)\.system"),
        (Attack(eval, "1"), "(builtins|__builtin__).eval"),
        (Attack(np.load, "x"), "numpy"),
        ({"data": Attack(getattr, (1).__class__, "real")}, "getattr"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused(tmp_path: Path, content: object, asks: str, protocol: int) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(content, protocol=protocol))
    with pytest.raises(BadInput, match=f"data_batch_1: refused: the pickle asks for .*{asks}"):
        load_dataset(str(tmp_path))


def test_other_bad_cifar(tmp_path: Path) -> None:
    batch = tmp_path / "data_batch_1"
    good = python2_batch(pixels(2, 3072), [0, 1])
    codec = b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R."
    for content, message in [
        (good[: len(good) // 2], "truncated or not a CIFAR batch"),
        (b"", "truncated or not a CIFAR batch"),
        (python2_batch(pixels(2, 3072), [0]), "2 images but 1 labels"),
        (python2_batch(pixels(2, 10), [0, 1]), r"not uint8 \[images, 3072\]"),
        (python2_batch(pixels(2, 3072), [0, 1], b"other"), "no list of integer labels"),
        (pickle.dumps([1, 2], protocol=2), "holds a list"),
        (pickle.dumps({"data": np.array(["a", {}], object)}, protocol=2), "not plain uint8"),
        (good.replace(b"J\x02\x00\x00\x00J\x00\x0c", b"J\x03\x00\x00\x00J\x00\x0c"), "not plain uint8"),
        (codec, "codec 'rot13'"),
    ]:
        batch.write_bytes(content)
        with pytest.raises(BadInput, match=message):
            load_dataset(str(tmp_path))


# --- CSV ---------------------------------------------------------------------------------------------------------


def write_csv(path: Path, rows: list[list[str]]) -> None:
    buffer = io.StringIO()
    csv.writer(buffer, quoting=csv.QUOTE_ALL).writerows(rows)
    path.write_text(buffer.getvalue(), encoding="utf-8")


def test_news_csv(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", [["3", "Title, one", 'He said "yes"'], ["1", "T", "d"]])
    write_csv(tmp_path / "test.csv", [["Class Index", "Title", "Description"], ["2", "T", "d"]])
    (tmp_path / "classes.txt").write_text("World\nSports\nBusiness\n")
    data = load_dataset(str(tmp_path), Reading(length=6, vocabulary=100))
    assert data.y.tolist() == [2, 0, 1]
    assert data.label_names == ("World", "Sports", "Business")
    assert data.split is not None
    assert data.split.tolist() == [0, 0, 1]
    assert data.x[0].tolist() == [1 + zlib.crc32(w) % 99 for w in (b"title", b"one", b"he", b"said", b"yes")] + [0]
    assert load_dataset(str(tmp_path / "train.csv")).split is None


def test_bad_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for rows, message in [
        ([], "is empty; check the file"),
        ([["1", "t", "d"], ["x", "t", "d"]], "line 2 is not class,title,description"),
        ([["0", "t", "d"]], "line 1 is not"),
        ([["1", "t", "d"], ["1"]], "line 2 is not"),
        ([["1"]], "its first line has numbers; put the columns' names there"),
    ]:
        write_csv(path, rows)
        with pytest.raises(BadInput, match=message):
            load_dataset(str(path))
    path.write_bytes(b'1,"\xff\xfe",x\n')
    with pytest.raises(BadInput, match=r"a\.csv: cannot be read as UTF-8 CSV"):
        load_dataset(str(path))


# --- LEAF --------------------------------------------------------------------------------------------------------


def leaf(path: Path, data: dict[str, tuple[list[Any], list[Any]]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    users = {user: {"x": x, "y": y} for user, (x, y) in data.items()}
    path.write_text(json.dumps({"users": list(data), "num_samples": [], "user_data": users}))
    return path


def test_leaf_images_by_writer(tmp_path: Path) -> None:
    image = [0.5] * 784
    leaf(tmp_path / "train" / "a.json", {"w2": ([image, image], [0, 3]), "w1": ([image], [1])})
    leaf(tmp_path / "test" / "a.json", {"w1": ([image], [2])})
    data = load_dataset(str(tmp_path))
    assert data.x.shape == (4, 1, 28, 28)
    assert data.user_names == ("w1", "w2")
    assert data.user is not None
    assert data.split is not None
    rows = sorted(zip(data.split.tolist(), data.user.tolist(), data.y.tolist(), strict=True))
    assert rows == [(0, 0, 1), (0, 1, 0), (0, 1, 3), (1, 0, 2)]


def test_leaf_characters_words_and_tweets(tmp_path: Path) -> None:
    text = load_dataset(str(leaf(tmp_path / "s.json", {"a": (["ab", "ba"], ["c", "a"])})))
    assert text.x.tolist() == [[0, 1], [1, 0]]
    assert text.y.tolist() == [2, 0]
    assert text.label_names == ("a", "b", "c")
    words = load_dataset(str(leaf(tmp_path / "w.json", {"a": (["one two", "three"], [1, 0])})), Reading(length=3))
    assert (words.x[0] > 0).tolist() == [True, True, False]
    tweet = ["1", "date", "query", "author", "good day", "training"]
    tweets = load_dataset(str(leaf(tmp_path / "t.json", {"a": ([tweet, tweet], [1, 0])})), Reading(length=3))
    assert (tweets.x[0] > 0).sum() == 2
    features = load_dataset(str(leaf(tmp_path / "f.json", {"a": ([[1, 2], [3, 4]], [1, 0])})))
    assert features.x.dtype == torch.float32


def test_bad_leaf(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content, message in [
        ("{", "not readable JSON"),
        ("[]", "has no users and user_data"),
        ('{"users": ["u"], "user_data": {}}', "user 'u' has no lists x and y"),
        ('{"users": ["u"], "user_data": {"u": {"x": [[1]], "y": []}}}', "user 'u' has 1 x but 0 y"),
        ('{"users": [], "user_data": {}}', "holds no samples"),
        ('{"users": ["u"], "user_data": {"u": {"x": [[1], [1, 2]], "y": [0, 1]}}}', "rows of x differ in shape"),
        ('{"users": ["u"], "user_data": {"u": {"x": [[NaN]], "y": [0]}}}', "NaN or infinity"),
        ('{"users": ["u"], "user_data": {"u": {"x": [{}], "y": [0]}}}', "x is not numeric"),
        ('{"users": ["u"], "user_data": {"u": {"x": ["ab", "a"], "y": ["a", "b"]}}}', "differ in length"),
    ]:
        path.write_text(content)
        with pytest.raises(BadInput, match=message):
            load_dataset(str(path))


# --- Hugging Face ------------------------------------------------------------------------------------------------


def test_hub_from_local_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    features = datasets.Features(
        image=datasets.Array2D((4, 5), "uint8"),
        label=datasets.ClassLabel(names=["no", "yes"]),
        writer_id=datasets.Value("string"),
    )
    columns = {"image": pixels(3, 4, 5), "label": [1, 0, 1], "writer_id": ["u", "v", "u"]}
    half = datasets.Dataset.from_dict(columns, features=features)
    datasets.DatasetDict({"train": half, "test": half.select([0])}).save_to_disk(tmp_path / "saved")
    data = load_dataset(f"hf:{tmp_path / 'saved'}")
    assert data.x.shape == (4, 1, 4, 5)
    assert np.allclose(data.x[:3, 0].numpy() * 255, columns["image"])
    assert data.y.tolist() == [1, 0, 1, 1]
    assert data.label_names == ("no", "yes")
    assert data.user_names == ("u", "v")
    assert data.split is not None
    assert data.split.tolist() == [0, 0, 0, 1]

    texts = datasets.Dataset.from_dict({"text": ["good film", "bad"], "label": [1, 0]})
    (tmp_path / "parquet").mkdir()
    texts.to_parquet(tmp_path / "parquet" / "train.parquet")
    words = load_dataset(f"hf:{tmp_path / 'parquet'}", Reading(length=3))
    assert (words.x > 0).sum(dim=1).tolist() == [2, 1]

    datasets.Dataset.from_dict({"other": [1]}).save_to_disk(tmp_path / "odd")
    with pytest.raises(BadInput, match=r"hf:.*odd: has columns other; say which to predict with data\.label"):
        load_dataset(f"hf:{tmp_path / 'odd'}")


def test_hub_tables_text_and_images(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")
    image = pytest.importorskip("PIL.Image", reason="the images extra is not installed")
    table = {"age": [31, 40, 55], "town": ["York", "Bath", "York"], "who": [7, 7, 8], "risk": ["low", "high", "low"]}
    datasets.Dataset.from_dict(table).save_to_disk(tmp_path / "table")
    data = load_dataset(f"hf:{tmp_path / 'table'}", Reading(label="risk", user="who"))
    assert data.x.tolist() == [[31, 0, 1], [40, 1, 0], [55, 0, 1]]
    assert data.label_names == ("high", "low")
    assert data.user_names == ("7", "8")

    texts = {"idx": [3, 5], "sentence": ["good film", "bad"], "label": ["pos", "neg"]}
    half = datasets.Dataset.from_dict(texts)
    datasets.DatasetDict({"train": half, "validation": half}).save_to_disk(tmp_path / "text")
    words = load_dataset(f"hf:{tmp_path / 'text'}", Reading(length=3))
    assert (words.x > 0).sum(dim=1).tolist() == [2, 1, 2, 1]
    assert words.label_names == ("neg", "pos")
    assert words.split is not None
    assert words.split.tolist() == [0, 0, 1, 1]

    pictures = [image.fromarray(pixels(4, 5)), image.fromarray(pixels(4, 5, 3))]
    features = datasets.Features(img=datasets.Image(), animal=datasets.ClassLabel(names=["cat", "dog"]))
    saved = datasets.Dataset.from_dict({"img": pictures, "animal": [1, 0]}, features=features)
    saved.save_to_disk(tmp_path / "images")
    seen = load_dataset(f"hf:{tmp_path / 'images'}", Reading(label="animal", size=3))
    assert seen.x.shape == (2, 3, 3, 3)
    assert seen.label_names == ("cat", "dog")
    assert seen.y.tolist() == [1, 0]


def test_hub_offline_names_the_local_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")

    def offline(name: str) -> None:
        raise ConnectionError(f"Couldn't reach {name} on the Hub\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(BadInput, match=r"hf:mnist: cannot be loaded .*use a local source instead: digits") as caught:
        load_dataset("hf:mnist")
    assert "\n" not in str(caught.value)


def test_hub_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match=r"pip install 'personafl\[hf\]'; or use a local source"):
        load_dataset("hf:mnist")


# --- finding the format ------------------------------------------------------------------------------------------


def test_unknown_sources(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"'digit': unknown; did you mean 'digits'\?.*understood: digits; FILE\.npz"):
        load_dataset("digit")
    with pytest.raises(BadInput, match="'mnist': is read from files you have; write FOLDER"):
        load_dataset("mnist")
    with pytest.raises(BadInput, match="no such file or folder"):
        load_dataset(str(tmp_path / "none.npz"))
    (tmp_path / "a.xyz").write_text("?")
    with pytest.raises(BadInput, match=r"a\.xyz: format not recognised; understood"):
        load_dataset(str(tmp_path / "a.xyz"))
    with pytest.raises(BadInput, match="no data recognised in this folder; understood"):
        load_dataset(str(tmp_path))


def test_the_list_of_sources() -> None:
    names = [source.name for source in SOURCES]
    assert names[0] == "digits"
    assert len(set(names)) == len(names)
    assert all(source.summary and source.usage for source in SOURCES)


def test_the_next_word(tmp_path: Path) -> None:
    """Words by frequency from 1 (ties by alphabet), the others rare (0): rare words are read but are no answer."""
    texts = ["To be, or not to be", "be to"]
    flat = "".join(texts).encode()
    path = tmp_path / "plays.npz"
    np.savez(path, text=np.frombuffer(flat, np.uint8), offset=np.array([0, len(texts[0]), len(flat)]))
    data = load_dataset(str(path), Reading(length=3, vocabulary=4, unit="word"))
    # be 3, to 3, not 1, or 1: numbers be=1, to=2, not=3, or=0
    assert data.label_names == ("(rare)", "be", "to", "not")
    assert data.x.tolist() == [[2, 1, 0], [3, 2, 0], [1, 0, 0]]
    assert data.y.tolist() == [[1, -1, 3], [2, 1, -1], [2, -1, -1]]
    assert data.user is not None
    assert data.user.tolist() == [0, 0, 1]
    assert data.vocabulary == 4
