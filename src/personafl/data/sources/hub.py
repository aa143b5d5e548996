"""Hugging Face `datasets`: by name where there is a network, or from a local folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from personafl.data.sources.dataset import Array, Dataset, TextOptions, checked, images_to_float
from personafl.data.sources.text import hashed_words
from personafl.errors import BadInput

IMAGES = ("image", "img", "images", "x", "pixels")
TEXTS = ("text", "sentence", "content")
LABELS = ("label", "labels", "fine_label", "character", "y")
USERS = ("user", "user_id", "writer_id", "client_id", "speaker_id")
LOCAL = "use a local source instead: digits, a .npz file, MNIST, CIFAR, CSV or LEAF files, or hf:FOLDER"


def read_hub(name: str, options: TextOptions) -> Dataset:
    """Read the train and test splits of a data set with an image or text column and a label column."""
    halves = [(key, half) for key, half in _splits(name).items() if key in ("train", "test")]
    halves.sort(key=lambda pair: pair[0] == "test")
    if not halves:
        raise BadInput(f"hf:{name}: has no split called train or test; save one and name its folder, hf:FOLDER")
    columns = halves[0][1].column_names
    label = _column(columns, LABELS)
    image, text = _column(columns, IMAGES), _column(columns, TEXTS)
    if label is None or (image is None and text is None):
        raise BadInput(
            f"hf:{name}: has columns {', '.join(columns)}; needs one of {', '.join(LABELS)} and one of "
            f"{', '.join(IMAGES + TEXTS)}; rename them and name the folder, hf:FOLDER"
        )
    user = _column(columns, USERS)
    sizes = [len(half) for _, half in halves]
    x: Array
    if image is not None:
        x = _images(name, _values(name, halves, image))
    else:
        x = hashed_words(map(str, _values(name, halves, text)), options)
    return checked(
        f"hf:{name}",
        name=Path(name).name,
        x=x,
        y=np.array(_values(name, halves, label)),
        user=np.array([str(value) for value in _values(name, halves, user)]) if user else None,
        split=np.repeat(np.arange(len(halves)), sizes) if len(halves) > 1 else None,
        label_names=getattr(halves[0][1].features[label], "names", None) or (),
        vocabulary=options.vocabulary if image is None else None,
    )


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


def _column(columns: Sequence[str], known: Sequence[str]) -> str | None:
    return next((name for name in known if name in columns), None)


def _values(name: str, halves: Sequence[tuple[str, Any]], column: str | None) -> list[Any]:
    try:
        return [value for _, half in halves for value in half[column]]
    except ImportError as error:
        raise BadInput(f"hf:{name}: column {column!r} cannot be decoded ({error}); install that package") from None


def _images(name: str, samples: list[Any]) -> Array:
    arrays = [np.asarray(sample) for sample in samples]
    shapes = {array.shape for array in arrays}
    if len(shapes) != 1:
        raise BadInput(
            f"hf:{name}: images have {len(shapes)} different shapes; resize them and name the folder, hf:FOLDER"
        )
    stacked = np.stack(arrays)
    if stacked.dtype.kind not in "iu":
        return stacked
    if stacked.min() < 0 or stacked.max() > 255:
        raise BadInput(f"hf:{name}: integer pixels must lie in 0 … 255; scale them and name the folder, hf:FOLDER")
    return stacked / np.float32(255) if stacked.ndim == 2 else images_to_float(f"hf:{name}", stacked)
