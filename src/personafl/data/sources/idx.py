"""MNIST's idx files, plain or gzipped (also Fashion-MNIST, EMNIST, KMNIST). LeCun et al. 1998."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from personafl.core.reading import Reading
from personafl.data.sources.dataset import Dataset, checked, images_to_float
from personafl.errors import BadInput


def idx_images(folder: Path) -> list[Path]:
    """Return the idx image files of a folder."""
    return sorted(path for path in folder.iterdir() if _is_images(path))


def read_idx(path: Path, reading: Reading) -> Dataset:
    """Read a folder with the halves `train-images-idx3-ubyte[.gz]`, `t10k-…` and their labels, or one image file."""
    files = idx_images(path) if path.is_dir() else [path]
    if not all(_is_images(file) for file in files):
        raise BadInput(f"{path}: is not an idx image file; name the folder or the …images-idx3-ubyte[.gz] file")
    halves = [int(any(word in file.name for word in ("t10k", "test"))) for file in files]
    if len(set(halves)) < len(halves):
        raise BadInput(
            f"{path}: holds several data sets ({', '.join(f.name for f in files)}); keep one pair of halves per folder"
        )
    images = [_array(file, 3) for file in files]
    labels = [_array(_labels_of(file), 1) for file in files]
    for file, x, y in zip(files, images, labels, strict=True):
        if len(x) != len(y):
            raise BadInput(f"{file}: {len(x)} images but {len(y)} labels beside it; download both files again")
    return checked(
        str(path),
        name=path.name if path.is_dir() else path.name.split("-images")[0],
        x=images_to_float(str(path), np.concatenate(images)),
        y=np.concatenate(labels),
        split=np.repeat(halves, [len(x) for x in images]) if len(files) > 1 else None,
        reading=reading,
    )


def _is_images(path: Path) -> bool:
    return "images" in path.name and "idx3" in path.name and path.is_file()


def _labels_of(images: Path) -> Path:
    stem = images.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
    for name in (stem, f"{stem}.gz"):
        if (images.parent / name).is_file():
            return images.parent / name
    raise BadInput(f"{images}: its labels {stem}[.gz] are missing; put them beside it")


def _array(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Decode one file: two zero bytes, type 8 (uint8), the number of dimensions, big-endian sizes, the bytes."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(
            f"{path}: cannot be read ({type(error).__name__}), truncated or not gzip; download it again"
        ) from None
    if raw[:4] != bytes([0, 0, 8, dimensions]) or len(raw) < 4 + 4 * dimensions:
        raise BadInput(f"{path}: is not an idx file of uint8 with {dimensions} dimensions; download it again")
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", count=dimensions, offset=4))
    body = np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions)
    if len(body) != math.prod(shape):
        raise BadInput(f"{path}: is truncated, {len(body)} of {math.prod(shape)} bytes; download it again")
    return body.reshape(shape)
