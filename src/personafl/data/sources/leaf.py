"""LEAF's JSON: `users` and `user_data` with x and y per user. Caldas et al. 2018.

Numbers (FEMNIST, Synthetic) are features, rows of 784 becoming 28 × 28 images. Strings with a one-character y
(Shakespeare) are characters, one label each. Other strings, or rows of strings whose fifth is the text (Sent140), are
hashed words.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from personafl.core.reading import Reading
from personafl.data.sources.dataset import Array, Dataset, checked
from personafl.data.sources.documents import numbered
from personafl.errors import BadInput


def leaf_files(folder: Path) -> list[tuple[Path, int]]:
    """Return the JSON files of a folder with their half: those in train/ 0, in test/ 1, or all of a flat folder 0."""
    halves = [(path, half) for half, name in enumerate(("train", "test")) for path in (folder / name).glob("*.json")]
    return sorted(halves or [(path, 0) for path in folder.glob("*.json")])


def read_leaf(path: Path, reading: Reading) -> Dataset:
    """Read one LEAF file or a folder of them."""
    xs: list[Any] = []
    ys: list[Any] = []
    users: list[str] = []
    halves: list[int] = []
    for file, half in leaf_files(path) if path.is_dir() else [(path, 0)]:
        for user, its_x, its_y in _users(file):
            xs += its_x
            ys += its_y
            users += [user] * len(its_x)
            halves += [half] * len(its_x)
    if not xs:
        raise BadInput(f"{path}: holds no samples; check the LEAF preprocessing")
    x, y, names, vocabulary = _numbers(path, xs, ys, reading)
    return checked(
        str(path),
        name=path.stem,
        x=x,
        y=y,
        user=np.array(users),
        split=np.array(halves, dtype=np.int64) if any(halves) else None,
        label_names=names,
        vocabulary=vocabulary,
        reading=reading,
    )


def _users(path: Path) -> Iterable[tuple[str, list[Any], list[Any]]]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(
            f"{path}: is not readable JSON ({type(error).__name__}), perhaps truncated; make it again"
        ) from None
    if not isinstance(content, dict) or not {"users", "user_data"} <= content.keys():
        raise BadInput(f"{path}: has no users and user_data; it is not a LEAF file")
    for user in content["users"]:
        data = content["user_data"].get(user)
        if not isinstance(data, dict) or not isinstance(data.get("x"), list) or not isinstance(data.get("y"), list):
            raise BadInput(f"{path}: user {user!r} has no lists x and y in user_data; make the file again")
        if len(data["x"]) != len(data["y"]):
            raise BadInput(f"{path}: user {user!r} has {len(data['x'])} x but {len(data['y'])} y; make the file again")
        yield str(user), data["x"], data["y"]


def _numbers(
    path: Path, xs: list[Any], ys: list[Any], reading: Reading
) -> tuple[Array, Array, tuple[str, ...], int | None]:
    if all(isinstance(x, str) for x in xs) and all(isinstance(y, str) and len(y) == 1 for y in ys):
        return _characters(path, xs, ys)
    y = _array(path, "y", ys)
    if all(isinstance(x, str) for x in xs):
        tokens, vocabulary = numbered(xs, reading)
        return tokens, y, (), vocabulary
    if all(isinstance(x, list) and x and all(isinstance(part, str) for part in x) for x in xs):
        tokens, vocabulary = numbered([x[4] if len(x) > 4 else " ".join(x) for x in xs], reading)
        return tokens, y, (), vocabulary
    x = _array(path, "x", xs)
    if x.dtype.kind in "iu":
        x = x.astype(np.float32)
    if x.ndim == 2 and x.shape[1] == 784:
        x = x.reshape(-1, 1, 28, 28)
    return x, y, (), None


def _characters(path: Path, xs: list[str], ys: list[str]) -> tuple[Array, Array, tuple[str, ...], int]:
    length = len(xs[0])
    if any(len(x) != length for x in xs):
        raise BadInput(f"{path}: the strings of x differ in length; make windows of one length")
    alphabet = sorted(set("".join(xs)) | set(ys))
    position = {character: number for number, character in enumerate(alphabet)}
    x = np.array([[position[character] for character in text] for text in xs], dtype=np.int64)
    return x, np.array([position[y] for y in ys], dtype=np.int64), tuple(alphabet), len(alphabet)


def _array(path: Path, key: str, values: list[Any]) -> NDArray[np.generic]:
    try:
        array = np.array(values)
    except ValueError:
        raise BadInput(f"{path}: the rows of {key} differ in shape; every sample must have the same") from None
    if array.dtype.kind not in "iuf":
        raise BadInput(f"{path}: {key} is not numeric; see the LEAF formats that are understood")
    return array
