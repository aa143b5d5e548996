"""The list of sources, and finding out which one a string means."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from personafl.core.reading import AS_FOUND, Reading
from personafl.data.sources.cifar import TEST, TRAIN, cifar_batches, read_cifar
from personafl.data.sources.dataset import Dataset, checked
from personafl.data.sources.hub import read_hub
from personafl.data.sources.idx import idx_images, read_idx
from personafl.data.sources.images import image_files, read_images
from personafl.data.sources.leaf import leaf_files, read_leaf
from personafl.data.sources.news import is_news, read_news
from personafl.data.sources.npz import read_npz
from personafl.data.sources.tablefile import halves_of, is_table, read_table
from personafl.errors import BadInput, did_you_mean


@dataclass(frozen=True)
class Source:
    """One kind of source: what it is called, what to write in `data.source`, where it comes from."""

    name: str
    usage: str
    summary: str
    paper: str


SOURCES = (
    Source(
        "digits",
        "digits",
        "1,797 handwritten digits, 8 × 8, 10 classes; bundled with scikit-learn, no download",
        "Alpaydin and Kaynak 1998, Optical recognition of handwritten digits (UCI)",
    ),
    Source(
        "npz", "FILE.npz", "your own arrays: x or images, y or labels, optional user and split; or text, offset", ""
    ),
    Source(
        "mnist",
        "FOLDER with *-images-idx3-ubyte[.gz]",
        "MNIST's idx files; also Fashion-MNIST, KMNIST, EMNIST",
        "LeCun et al. 1998, Gradient-based learning applied to document recognition",
    ),
    Source(
        "cifar",
        "FOLDER with data_batch_1 … or train, test",
        "CIFAR-10 or CIFAR-100, the Python version, read without running its pickles",
        "Krizhevsky 2009, Learning multiple layers of features from tiny images",
    ),
    Source(
        "table",
        "FILE.csv, .tsv, .parquet or .jsonl, or FOLDER with train.csv, test.csv",
        "a row per sample, with a column to predict (data.label), or of text (data.text); and of users (data.user)",
        "",
    ),
    Source("images", "FOLDER with CLASS/*.png or USER/CLASS/*.png", "images by class; also under train/ and test/", ""),
    Source(
        "news",
        "FILE.csv or FOLDER with train.csv, test.csv",
        "AG-News-style text without columns' names: class (from 1), title, description",
        "Zhang, Zhao, LeCun 2015, Character-level convolutional networks for text classification",
    ),
    Source(
        "leaf",
        "FILE.json or FOLDER with train/*.json, test/*.json",
        "LEAF's federated data (FEMNIST, Shakespeare, Sent140, Synthetic), by natural user",
        "Caldas et al. 2018, LEAF: a benchmark for federated settings",
    ),
    Source(
        "hf",
        "hf:NAME or hf:FOLDER",
        "a Hugging Face data set: images, text or a table, with a column to predict (extra: hf)",
        "Lhoest et al. 2021, Datasets: a community library for natural language processing",
    ),
)

UNDERSTOOD = "understood: " + "; ".join(source.usage for source in SOURCES)

IN_PYTHON = "python:"  # begins what a recipe has for the source of data that were an object
_COLUMNS = ("label", "user", "split", "text", "prompt", "features", "drop", "categories", "missing")


def load_dataset(source: str, reading: Reading = AS_FOUND) -> Dataset:
    """Load `digits`, a file, a folder or `hf:NAME`; the format is told from the name and the contents."""
    if source == "digits":
        check_keys(source, reading)
        return _digits(reading)
    if source.startswith("hf:"):
        check_keys(source, reading, *_COLUMNS, "size")
        return read_hub(source.removeprefix("hf:"), reading)
    if source.startswith(IN_PYTHON):
        kind = source.removeprefix(IN_PYTHON)
        raise BadInput(f"data.source = {source!r}: was an object in Python ({kind}); go on there, and give it again")
    path = Path(source).expanduser()
    if not path.exists():
        looks_like_path = path.suffix or len(path.parts) > 1
        remedy = "no such file or folder; check the path" if looks_like_path else _named_remedy(source)
        raise BadInput(f"data source {source!r}: {remedy}")
    return _folder(path, reading) if path.is_dir() else _file(path, reading)


def _named_remedy(source: str) -> str:
    if any(source == known.name for known in SOURCES):
        usage = next(known.usage for known in SOURCES if known.name == source)
        return f"is read from files you have; write {usage}"
    return f"unknown; {did_you_mean(source, ['digits'])} or a path; {UNDERSTOOD}"


def _file(path: Path, reading: Reading) -> Dataset:
    if path.suffix == ".npz":
        check_keys(str(path), reading, "label", "user", "split")
        return read_npz(path, reading)
    if is_table(path):
        return _table(path, path, reading)
    check_keys(str(path), reading)
    if path.suffix == ".json":
        return read_leaf(path, reading)
    if "idx" in path.name:
        return read_idx(path, reading)
    if path.name in (*TRAIN, *TEST):
        return read_cifar(path, reading)
    raise BadInput(f"{path}: format not recognised; {UNDERSTOOD}")


def _folder(path: Path, reading: Reading) -> Dataset:
    if tables := halves_of(path):
        return _table(path, tables[0], reading)
    known = idx_images(path) or cifar_batches(path) or leaf_files(path)
    if not known and (files := image_files(path)):
        check_keys(str(path), reading, "size")
        return read_images(path, files, reading)
    check_keys(str(path), reading)
    if idx_images(path):
        return read_idx(path, reading)
    if cifar_batches(path):
        return read_cifar(path, reading)
    if known:
        return read_leaf(path, reading)
    raise BadInput(f"{path}: no data recognised in this folder; {UNDERSTOOD}")


def _table(path: Path, first: Path, reading: Reading) -> Dataset:
    """Read a table, or AG News's layout: there no column is called as a label is, and lines begin with a class."""
    news = first.suffix == ".csv" and reading.label is None and is_news(first)
    check_keys(str(path), reading, *(() if news else _COLUMNS))
    return read_news(path, reading) if news else read_table(path, reading)


def check_keys(where: str, reading: Reading, *known: str) -> None:
    """Refuse keys that say nothing of this format, for their user expects something of them."""
    for key in (*_COLUMNS, "size"):
        if key not in known and reading.who == "all" and getattr(reading, key) != getattr(AS_FOUND, key):
            kind = "for images in a folder" if key == "size" else "for tables and arrays with names"
            raise BadInput(f"{where}: data.{key} is {kind}, and says nothing of these data; remove it")


def _digits(reading: Reading) -> Dataset:
    from sklearn.datasets import load_digits

    bundle = load_digits()
    images = bundle.images.astype(np.float32)[:, None] / np.float32(16)
    return checked("digits", name="digits", x=images, y=bundle.target, reading=reading)
