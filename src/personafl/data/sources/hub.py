"""Hugging Face `datasets`: by name where there is a network, or from a local folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from personafl.core.reading import Reading
from personafl.data.sources.dataset import Array, Dataset, images_to_float
from personafl.data.sources.images import stacked
from personafl.data.sources.table import LABELS, TEXTS, from_frames
from personafl.errors import BadInput

IMAGES = ("image", "img", "images", "x", "pixels")
LOCAL = "use a local source instead: digits, a .npz file, MNIST, CIFAR, CSV or LEAF files, or hf:FOLDER"


def read_hub(name: str, reading: Reading) -> Dataset:
    """Read the train and test splits of a data set: images, text or a table, with a column of labels."""
    return from_splits(f"hf:{name}", Path(name).name, _splits(name), reading)


def from_splits(where: str, name: str, found: Mapping[str, Any], reading: Reading) -> Dataset:
    """Make a data set of the splits train and test, or validation where there is no test."""
    keys = [key for key in ("train", "test" if "test" in found else "validation") if key in found]
    if not keys:
        raise BadInput(f"{where}: has no split called train or test; save one and name its folder, hf:FOLDER")
    halves = [found[key] for key in keys]
    columns = halves[0].column_names
    wanted = columns if reading.features is None else reading.features
    image = next((column for column in IMAGES if column in columns and column in wanted), None)
    frames = [_frame(where, half.remove_columns([] if image is None else [image])) for half in halves]
    label = (
        reading.label
        if isinstance(reading.label, str)
        else next((column for column in LABELS if column in columns), None)
    )
    names = getattr(halves[0].features.get(label), "names", None) or ()
    x = None
    if image is None:
        texts = [column for column in TEXTS if column in columns]
        if texts and reading.features is None and reading.text is None:
            reading = reading.model_copy(update={"features": tuple(texts[:1])})
    else:
        x = _images(where, [value for half in halves for value in _values(where, half, image)], reading)
    return from_frames(where, name, frames, reading, names, x)


def _splits(name: str) -> Mapping[str, Any]:
    try:
        import datasets
    except ImportError:
        raise BadInput(f"hf:{name}: needs the package datasets, pip install 'personafl[hf]'; or {LOCAL}") from None
    folder = Path(name)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
            found = datasets.load_from_disk(name)
        else:
            found = datasets.load_dataset(name)
    except Exception as error:  # the hub's client raises many kinds, all of them meaning: not available
        reason = str(error).strip().split("\n")[0][:120]
        raise BadInput(f"hf:{name}: cannot be loaded ({type(error).__name__}: {reason}); {LOCAL}") from None
    return found if isinstance(found, Mapping) else {"train": found}


def _frame(where: str, half: Any) -> Any:
    try:
        return half.to_pandas()
    except ImportError as error:
        raise BadInput(f"{where}: cannot be decoded ({error}); install that package") from None


def _values(where: str, half: Any, column: str) -> list[Any]:
    try:
        return list(half[column])
    except ImportError as error:
        raise BadInput(f"{where}: column {column!r} cannot be decoded ({error}); install that package") from None


def _images(where: str, samples: list[Any], reading: Reading) -> Array:
    if hasattr(samples[0], "getbands"):  # Pillow's
        names = [f"{where}: image {place}" for place in range(len(samples))]
        return images_to_float(where, stacked(names, [image.copy for image in samples], reading.size))
    arrays = [np.asarray(sample) for sample in samples]
    if len({array.shape for array in arrays}) != 1:
        raise BadInput(f"{where}: images differ in shape; save them as images, and give data.size = 32, say")
    pixels = np.stack(arrays)
    if pixels.dtype.kind not in "iu":
        return pixels
    if pixels.min() < 0 or pixels.max() > 255:
        raise BadInput(f"{where}: integer pixels must lie in 0 … 255; scale them and name the folder, hf:FOLDER")
    return pixels / np.float32(255) if pixels.ndim == 2 else images_to_float(where, pixels)
