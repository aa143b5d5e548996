"""CIFAR-10 and CIFAR-100 as published: Python pickles, read without running anything they contain.

Krizhevsky 2009, Learning multiple layers of features from tiny images.
"""

import io
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from personafl.core.reading import Reading
from personafl.data.sources.dataset import Dataset, checked, images_to_float
from personafl.errors import BadInput

TRAIN = (*(f"data_batch_{number}" for number in range(1, 6)), "train")
TEST = ("test_batch", "test")
META = ("batches.meta", "meta")


def cifar_batches(folder: Path) -> list[Path]:
    """Return the batch files of a folder, training before test."""
    return [folder / name for name in (*TRAIN, *TEST) if (folder / name).is_file()]


def read_cifar(path: Path, reading: Reading) -> Dataset:
    """Read a folder with `data_batch_1` … `test_batch` (CIFAR-10) or `train`, `test` (CIFAR-100), or one batch."""
    files = cifar_batches(path) if path.is_dir() else [path]
    batches = [_batch(file) for file in files]
    sizes = [len(y) for _, y in batches]
    halves = np.repeat([int(file.name in TEST) for file in files], sizes)
    return checked(
        str(path),
        name=path.name,
        x=images_to_float(str(path), np.concatenate([x for x, _ in batches])),
        y=np.concatenate([y for _, y in batches]),
        split=halves if halves.any() and not halves.all() else None,
        label_names=_label_names(path if path.is_dir() else path.parent),
        reading=reading,
    )


def _batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content = _unpickle(path)
    data = content.get(b"data")
    labels = content.get(b"fine_labels", content.get(b"labels"))
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise BadInput(f"{path}: data is not uint8 [images, 3072]; use the official Python version of CIFAR")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise BadInput(
            f"{path}: has no list of integer labels or fine_labels; use the official Python version of CIFAR"
        )
    if len(labels) != len(data):
        raise BadInput(f"{path}: {len(data)} images but {len(labels)} labels; download it again")
    return data.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64)


def _label_names(folder: Path) -> list[str]:
    for name in META:
        if (folder / name).is_file():
            content = _unpickle(folder / name)
            names = content.get(b"fine_label_names", content.get(b"label_names"))
            if isinstance(names, list) and all(isinstance(label, bytes) for label in names):
                return [label.decode("utf-8", "replace") for label in names]
    return []


def _unpickle(path: Path) -> dict[bytes, Any]:
    try:
        content = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise BadInput(
            f"{path}: cannot be read ({type(error).__name__}), truncated or not a CIFAR batch; download it again"
        ) from None
    if not isinstance(content, dict):
        raise BadInput(f"{path}: holds a {type(content).__name__}, not a CIFAR batch; download it again")
    return {key.encode() if isinstance(key, str) else key: _plain(value) for key, value in content.items()}


def _plain(value: object) -> object:
    if isinstance(value, _PickledArray):
        return value.array
    if isinstance(value, list):
        return [item.encode() if isinstance(item, str) else item for item in value]
    return value


class _PickledType:
    """Stands for numpy.dtype: remembers the type code and ignores the rest of its state."""

    def __init__(self, code: bytes | str, *_: object) -> None:
        self.code = code.decode() if isinstance(code, bytes) else str(code)

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and flags: only one-byte types are read."""


class _PickledArray:
    """Stands for numpy.ndarray: numpy's own loader is never given untrusted state."""

    def __init__(self, *_: object) -> None:
        self.array: NDArray[np.uint8] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, raw = state
        if kind.code not in ("u1", "|u1") or not isinstance(raw, bytes) or math.prod(shape) != len(raw):
            raise BadInput("holds an array that is not plain uint8; use the official Python version of CIFAR")
        self.array = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


def _latin1(text: str, encoding: str | bytes) -> bytes:
    if encoding not in ("latin1", b"latin1"):
        raise BadInput(f"asks for the codec {encoding!r}, which no CIFAR batch needs; refused")
    return text.encode("latin1")


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that knows builtin containers and uint8 arrays, and refuses every other name."""

    _KNOWN = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy", "ndarray"): _PickledArray,
        ("numpy", "dtype"): _PickledType,
        ("_codecs", "encode"): _latin1,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return our stand-in for a known name."""
        try:
            return self._KNOWN[module, name]
        except KeyError:
            raise BadInput(f"refused: the pickle asks for {module}.{name}, which no CIFAR batch needs") from None
