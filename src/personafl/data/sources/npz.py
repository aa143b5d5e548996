"""The bring-your-own format: one .npz file.

Arrays: `x`, `images` or `features`, and `y`, `labels` or (real numbers) `targets`; optional `user`, `split` (0 train, 1
test), `class_name` (or `label_name`), `user_name` (or `speaker_name`, `writer_name`); `data.label = "coarse"` takes
`coarse` for labels and `coarse_name`. Or flat text: `text` (uint8 UTF-8) and `offset`, item i being
text[offset[i]:offset[i + 1]]; with labels it is classified by hashed words, without labels each item is a user whose
next character (byte) is predicted.
"""

import zipfile
import zlib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from personafl.core.reading import Reading
from personafl.data.sources.dataset import Array, Dataset, checked, images_to_float
from personafl.data.sources.documents import check_alike, next_tokens, numbered
from personafl.data.sources.text import characters, frequent_words, windows
from personafl.errors import BadInput, did_you_mean

Arrays = Mapping[str, Array]
_NAMES: dict[str, tuple[str, ...]] = {
    "label": ("class_name", "label_name"),
    "user": ("user_name", "speaker_name", "writer_name"),
    "split": (),
}


def read_npz(path: Path, reading: Reading) -> Dataset:
    """Read a .npz file; pickled objects inside it are refused."""
    arrays = _arrays(path, reading)
    if "text" in arrays and "offset" in arrays:
        return _text(path, arrays, reading)
    x_key, x = _first(arrays, "x", "images", "features")
    y_key, y = _first(arrays, "y", "labels", "targets")
    if y_key == "targets" and reading.task == "auto" and y is not None and y.dtype.kind == "f":
        reading = reading.model_copy(update={"task": "regression"})
    if x is None or (y is None and reading.who != "predict"):
        raise BadInput(
            f"{path}: has arrays {', '.join(sorted(arrays)) or '(none)'}; needs x, images or features, and y, labels "
            f"or targets; or text and offset"
        )
    where = f"{path}: {x_key}"
    if x.dtype == np.uint8:
        x = x.astype(np.float32) / np.float32(255) if x.ndim == 2 else images_to_float(where, x)
    elif x_key == "images" and x.ndim == 3:
        x = x[:, None]
    return checked(
        f"{path}: {x_key}, {y_key}",
        name=path.stem,
        x=x,
        y=y,
        user=arrays.get("user"),
        user_names=_names(arrays, *_NAMES["user"]),
        split=arrays.get("split"),
        label_names=_names(arrays, *_NAMES["label"]),
        reading=reading,
    )


def _text(path: Path, arrays: Arrays, reading: Reading) -> Dataset:
    text, offset = arrays["text"], arrays["offset"]
    if text.dtype != np.uint8 or text.ndim != 1:
        raise BadInput(f"{path}: text has dtype {text.dtype}, shape {list(text.shape)}; use flat uint8 UTF-8")
    if (
        offset.dtype.kind not in "iu"
        or offset.ndim != 1
        or len(offset) < 2
        or offset[0] != 0
        or offset[-1] != len(text)
        or (np.diff(offset.astype(np.int64)) < 0).any()
    ):
        raise BadInput(f"{path}: offset must be integers rising from 0 to {len(text)}, one more than there are items")
    bounds: NDArray[np.int64] = offset.astype(np.int64)
    user = arrays.get("user")
    user_names = _names(arrays, *_NAMES["user"])
    _, labels = _first(arrays, "labels", "y")
    if labels is None:
        return _next_tokens(path, text, bounds, arrays, user_names, reading)
    x, vocabulary = numbered(list(_decoded(text, bounds)), reading)
    return checked(
        f"{path}: text, labels",
        name=path.stem,
        x=x,
        y=labels,
        user=user,
        user_names=user_names,
        split=arrays.get("split"),
        label_names=_names(arrays, *_NAMES["label"]),
        vocabulary=vocabulary,
        reading=reading,
    )


def _next_tokens(
    path: Path, text: Array, bounds: NDArray[np.int64], arrays: Arrays, user_names: list[str], reading: Reading
) -> Dataset:
    """Make a data set of texts whose next tokens are predicted."""
    user = arrays.get("user")
    if len(text) == 0:
        raise BadInput(f"{path}: text is empty; check the file")
    split = arrays.get("split")
    for key, array in (("user", user), ("split", split)):
        if array is not None and array.shape != (len(bounds) - 1,):
            raise BadInput(
                f"{path}: {key} has shape {list(array.shape)}; give one for each of the {len(bounds) - 1} texts"
            )
    if reading.tokenizer is not None:
        texts, owner = list(_decoded(text, bounds)), np.arange(len(bounds) - 1) if user is None else user
        where, of = f"{path}: text", path.stem
        return next_tokens(where, of, texts, reading, user=owner, user_names=user_names, split=split)
    check_alike(f"{path}: text", reading)
    if reading.unit == "word":
        code, starts, names = frequent_words(_decoded(text, bounds), reading.vocabulary)
        x, y, item = windows(code, starts, reading.length)
        y = np.where(y == 0, -1, y)  # a rare word is no answer
    else:
        code, names = characters(text.view(np.uint8))
        x, y, item = windows(code, bounds, reading.length)
    return checked(
        f"{path}: text",
        name=path.stem,
        x=x,
        y=y,
        user=item if user is None else user[item],
        user_names=user_names,
        split=None if split is None else split[item],
        label_names=names,
        vocabulary=len(names),
        reading=reading,
    )


def _arrays(path: Path, reading: Reading) -> Arrays:
    wanted = {"x", "images", "features", "y", "labels", "targets", "user", "split", "text", "offset"}
    try:
        with path.open("rb") as handle:
            file = np.load(handle, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise BadInput(f"{path}: is a single array; save x and y together with np.savez")
            arrays = {key: file[key] for key in file.files if key in wanted or key.endswith("_name")}
            for key in _NAMES:
                _rename(path, file, arrays, key, reading)
            return arrays
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; check the path") from None
    except PermissionError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = "pickled objects are refused" if "Object arrays" in str(error) else "truncated or not a .npz file"
        raise BadInput(f"{path}: cannot be read, {reason}; save plain arrays with np.savez_compressed") from None


def _rename(path: Path, file: Mapping[str, Array], arrays: dict[str, Array], key: str, reading: Reading) -> None:
    """Put the array that the recipe names for a key in the place of the usual one, with the names of its values."""
    name, usual = getattr(reading, key), ("y", "labels", "targets") if key == "label" else (key,)
    if isinstance(name, tuple):
        raise BadInput(f"{path}: data.label names several arrays; save one, y [samples, k], or a table")
    if name is None or name in usual[1:] or (name not in file and reading.who != "all"):
        return
    if name not in file:
        raise BadInput(f"{path}: data.{key} = {name!r} is no array; {did_you_mean(name, file)}")
    if name not in usual:
        for other in (*usual, *_NAMES[key]):
            arrays.pop(other, None)
        if f"{name}_name" in file:
            arrays[_NAMES[key][0]] = file[f"{name}_name"]
    arrays[usual[0]] = file[name]


def _first(arrays: Arrays, *keys: str) -> tuple[str, Array | None]:
    key = next((key for key in keys if key in arrays), keys[-1])
    return key, arrays.get(key)


def _names(arrays: Arrays, *keys: str) -> list[str]:
    for key in keys:
        if key in arrays:
            return [str(name) for name in np.atleast_1d(arrays[key])]
    return []


def _decoded(text: NDArray[np.generic], bounds: NDArray[np.int64]) -> Iterator[str]:
    whole = text.tobytes()
    return (whole[a:b].decode("utf-8", "replace") for a, b in pairwise(bounds))
