"""The list of sources, and finding out which one a string means."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from personafl.data.sources.cifar import TEST, TRAIN, cifar_batches, read_cifar
from personafl.data.sources.dataset import Dataset, TextOptions, checked
from personafl.data.sources.hub import read_hub
from personafl.data.sources.idx import idx_images, read_idx
from personafl.data.sources.leaf import leaf_files, read_leaf
from personafl.data.sources.news import read_news
from personafl.data.sources.npz import read_npz
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
        "csv",
        "FILE.csv or FOLDER with train.csv, test.csv",
        "AG-News-style text: class (from 1), title, description",
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
        "a Hugging Face data set with an image or text column and a label column (extra: hf)",
        "Lhoest et al. 2021, Datasets: a community library for natural language processing",
    ),
)

UNDERSTOOD = "understood: " + "; ".join(source.usage for source in SOURCES)


def load_dataset(source: str, options: TextOptions | None = None) -> Dataset:
    """Load `digits`, a file, a folder or `hf:NAME`; the format is told from the name and the contents."""
    options = options or TextOptions()
    if source == "digits":
        return _digits()
    if source.startswith("hf:"):
        return read_hub(source.removeprefix("hf:"), options)
    path = Path(source).expanduser()
    if not path.exists():
        looks_like_path = path.suffix or len(path.parts) > 1
        remedy = "no such file or folder; check the path" if looks_like_path else _named_remedy(source)
        raise BadInput(f"data source {source!r}: {remedy}")
    return _folder(path, options) if path.is_dir() else _file(path, options)


def _named_remedy(source: str) -> str:
    if any(source == known.name for known in SOURCES):
        usage = next(known.usage for known in SOURCES if known.name == source)
        return f"is read from files you have; write {usage}"
    return f"unknown; {did_you_mean(source, ['digits'])} or a path; {UNDERSTOOD}"


def _file(path: Path, options: TextOptions) -> Dataset:
    if path.suffix == ".npz":
        return read_npz(path, options)
    if path.suffix == ".csv":
        return read_news(path, options)
    if path.suffix == ".json":
        return read_leaf(path, options)
    if "idx" in path.name:
        return read_idx(path)
    if path.name in (*TRAIN, *TEST):
        return read_cifar(path)
    raise BadInput(f"{path}: format not recognised; {UNDERSTOOD}")


def _folder(path: Path, options: TextOptions) -> Dataset:
    if idx_images(path):
        return read_idx(path)
    if cifar_batches(path):
        return read_cifar(path)
    if (path / "train.csv").is_file():
        return read_news(path, options)
    if leaf_files(path):
        return read_leaf(path, options)
    raise BadInput(f"{path}: no data recognised in this folder; {UNDERSTOOD}")


def _digits() -> Dataset:
    from sklearn.datasets import load_digits

    bundle = load_digits()
    images = bundle.images.astype(np.float32)[:, None] / np.float32(16)
    return checked("digits", name="digits", x=images, y=bundle.target)
