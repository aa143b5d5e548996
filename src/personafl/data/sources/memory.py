"""Data in memory: tables, arrays and tensors, a dict of clients, torch's and Hugging Face's data sets.

They are checked as files are, and every message begins with the argument: data, or data['anna'] for one client's.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate
from torch.utils.data import Dataset as TorchDataset

from personafl.core.reading import Reading
from personafl.core.split import listed
from personafl.data.sources.dataset import Array, Dataset, checked, images_to_float
from personafl.data.sources.hub import from_splits
from personafl.data.sources.registry import check_keys
from personafl.data.sources.table import USERS, from_frames
from personafl.errors import BadInput

UNDERSTOOD = (
    "give a pandas DataFrame, {client: (x, y)}, {client: torch Dataset or DataLoader}, (x, y) with user=…, "
    "a Hugging Face Dataset, a FederatedData, or a path"
)
_CHUNK = 256  # samples that are put together at a time


def kind_of(data: Any) -> str:
    """Return what an object is, in a word; fail if it is nothing that can be learned from."""
    if _is(data, "pandas", "DataFrame"):
        return "DataFrame"
    if _is(data, "datasets", "Dataset") or _is(data, "datasets", "DatasetDict"):
        return "datasets"
    if _is(data, "sklearn.utils", "Bunch"):
        raise BadInput(
            "data: is a Bunch of scikit-learn's; give its arrays, (data.data, data.target), or its table, data.frame"
        )
    if isinstance(data, Mapping):
        return "clients"
    if isinstance(data, tuple | list) and data and all(isinstance(row, Mapping) for row in data):
        raise BadInput("data: is a list of dicts; make a table of it, pandas.DataFrame(data)")
    if _is_pair(data):
        return "arrays"
    if isinstance(data, TorchDataset | DataLoader):
        return "torch"
    what = "several parts, and two are meant: (x, y)" if isinstance(data, tuple | list) else f"a {type(data).__name__}"
    raise BadInput(f"data: is {what}; {UNDERSTOOD}")


def is_client(value: Any) -> bool:
    """Say whether a value of a dict can be one client's data."""
    if isinstance(value, Mapping):
        return bool(value) and set(value) <= {"train", "test"} and all(map(is_client, value.values()))
    if isinstance(value, TorchDataset | DataLoader) or _is(value, "pandas", "DataFrame"):
        return True
    return _is_pair(value) and not any(isinstance(part, str | bytes | int | float) for part in value)


def in_memory(data: Any, reading: Reading, user: Any = None) -> Dataset:
    """Make a data set of an object; `user` says whose each sample is, where the object does not."""
    kind = kind_of(data)
    if kind in ("DataFrame", "datasets"):
        if user is not None:
            raise BadInput("user: data have columns; give the name of the one that says whose a row is")
        return _frame(data, reading) if kind == "DataFrame" else _hub(data, reading)
    if kind == "clients":
        if user is not None:
            raise BadInput("user: the keys of data are the users already; leave it out")
        if data and all(_is(part, "pandas", "DataFrame") for part in data.values()):
            return _tables(data, reading)
    check_keys("data", reading)
    if kind == "clients":
        return _clients(data, reading)
    x, y = _pair("data", data)
    whose = None if user is None else _users(user, len(x))
    return checked("data", name="data", x=_scaled("data", x), y=y, user=whose, reading=reading)


def inputs_of(x: Any, reading: Reading, tokens: bool) -> torch.Tensor:
    """Return inputs to predict for: a table as the training data were read, or arrays; labels are not looked at."""
    reading = reading.model_copy(update={"who": "predict"})
    if _is(x, "pandas", "DataFrame") and (reading.features is not None or reading.text is not None):
        return from_frames("x", "x", [_plain("x", x)], reading).x
    values = _array("x", x)
    if not tokens and values.dtype.kind in "iu" and values.dtype != np.uint8:
        values = values.astype(np.float32)
    return checked("x", name="x", x=_scaled("x", values), y=None, reading=reading).x


def _frame(data: Any, reading: Reading) -> Dataset:
    return from_frames("data", "DataFrame", [_plain("data", data)], reading)


def _tables(data: Mapping[Any, Any], reading: Reading) -> Dataset:
    """Join the tables of clients to one, with a column of whose rows they are."""
    import pandas as pd

    _check_names(data)
    frames = [_plain(f"data[{client!r}]", part) for client, part in data.items()]
    columns = list(frames[0].columns)
    for client, frame in zip(data, frames, strict=True):
        if other := sorted(set(columns).symmetric_difference(frame.columns)):
            raise BadInput(
                f"data[{client!r}]: it and data[{next(iter(data))!r}] do not both have column {other[0]!r}; add it"
            )
        if not len(frame):
            raise BadInput(f"data[{client!r}]: has no rows; leave the client out, or give it some")
    user = next(name for name in (*USERS, "whose row it is") if name not in columns)
    whose = np.repeat([str(client) for client in data], [len(frame) for frame in frames])
    whole = pd.concat(frames, ignore_index=True).assign(**{user: whose})
    return from_frames("data", "clients", [whole], reading.model_copy(update={"user": user}))


def _plain(where: str, frame: Any) -> Any:
    """Return a table with text for columns' names and rows numbered from 0, as a file has them."""
    names = [str(name) for name in frame.columns]
    if frame.columns.nlevels > 1:
        raise BadInput(f"{where}: its columns have {frame.columns.nlevels} levels of names; join them to one")
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadInput(f"{where}: two columns are called {twice[0]!r}; give each a name of its own")
    return frame.set_axis(names, axis=1).reset_index(drop=True)


def _hub(data: Any, reading: Reading) -> Dataset:
    found = data if isinstance(data, Mapping) else {"train": data}
    name = getattr(next(iter(found.values()), None), "info", None)
    return from_splits("data", getattr(name, "dataset_name", None) or "datasets", found, reading)


def _clients(data: Mapping[Any, Any], reading: Reading) -> Dataset:
    """Join the data of clients, in the order of the dict."""
    if not data:
        raise BadInput("data: is an empty dict; give {client: (x, y)}")
    names = _check_names(data)
    halved = [isinstance(part, Mapping) for part in data.values()]
    if any(halved) and not all(halved):
        raise BadInput(
            f"data[{list(data)[halved.index(False)]!r}]: has no parts train and test, and other clients have"
        )
    xs: list[Array] = []
    ys, owner, split = [], [], []
    for number, (client, part) in enumerate(data.items()):
        where = f"data[{client!r}]"
        for half, (at, own) in enumerate(_halves(where, part)):
            x, y = _pair(at, own)
            _check_like(at, x, xs, next(iter(data)))
            _check_client(at, x, y)
            xs.append(x)
            ys.append(y)
            owner.append(np.full(len(x), number))
            split.append(np.full(len(x), half))
    x, y = np.concatenate(xs), _joined(ys)
    return checked(
        "data",
        name="clients",
        x=_scaled("data", x),
        y=y,
        user=np.concatenate(owner),
        user_names=names,
        split=np.concatenate(split) if any(halved) else None,
        reading=reading,
    )


def _check_names(data: Mapping[Any, Any]) -> list[str]:
    names = [str(name) for name in data]
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadInput(f"data: two clients are called {twice[0]!r}; give each a name of its own")
    return names


def _halves(where: str, part: Any) -> Sequence[tuple[str, Any]]:
    """Return a client's data, or those for training and for testing, and what messages call them."""
    if not isinstance(part, Mapping):
        return [(where, part)]
    if set(part) != {"train", "test"}:
        raise BadInput(f"{where}: has {listed(list(map(str, part)))}; give train and test")
    return [(f"{where}['{half}']", part[half]) for half in ("train", "test")]


def _check_like(where: str, x: Array, before: Sequence[Array], first: Any) -> None:
    if before and x.shape[1:] != before[0].shape[1:]:
        raise BadInput(
            f"{where}: samples have shape {list(x.shape[1:])}, and those of client {first!r} "
            f"{list(before[0].shape[1:])}; give all clients samples of one shape"
        )
    if before and (x.dtype.kind == "f") != (before[0].dtype.kind == "f"):
        raise BadInput(f"{where}: x has dtype {x.dtype}, and that of client {first!r} {before[0].dtype}; use one kind")


def _check_client(where: str, x: Array, y: Array) -> None:
    """Say whose samples are wrong, where the check of all would only count them."""
    if not len(x):
        raise BadInput(f"{where}: has no samples; leave the client out, or give it some")
    if x.ndim < 2:
        raise BadInput(f"{where}: x has shape {list(x.shape)}; give one row of features per sample, [samples, …]")
    if len(x) != len(y):
        raise BadInput(f"{where}: {len(x)} samples but {len(y)} labels; give one per sample")
    if x.dtype.kind == "f" and not np.isfinite(x.astype(np.float64)).all():
        bad = ~np.isfinite(x.astype(np.float64)).reshape(len(x), -1).all(axis=1)
        raise BadInput(f"{where}: sample {int(np.argmax(bad))} holds NaN or infinity; remove or fill it")


def _joined(ys: Sequence[Array]) -> Array:
    """Join labels; where some are text and others numbers, all become text."""
    text = any(y.dtype.kind in "US" for y in ys)
    return np.concatenate([y.astype(str) if text else y for y in ys])


def _pair(where: str, part: Any) -> tuple[Array, Array]:
    """Return x and y of a pair of arrays, or of one of torch's data sets."""
    if isinstance(part, TorchDataset | DataLoader):
        part = _stacked(where, part)
    if not _is_pair(part):
        raise BadInput(
            f"{where}: is a {type(part).__name__}; give a pair (x, y), a torch Dataset or DataLoader, "
            f"or DataFrames for all clients"
        )
    x, y = _array(f"{where}, x", part[0]), _array(f"{where}, y", part[1])
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]  # a column, as of a table
    if not y.ndim:
        raise BadInput(f"{where}: y is a single value; give a label per sample")
    return x, y


def _stacked(where: str, part: Any) -> tuple[Any, Any]:
    """Return all samples of one of torch's data sets, in its order, which no loader shuffles here."""
    collate = default_collate
    if isinstance(part, DataLoader):
        collate, part = part.collate_fn, part.dataset
    if isinstance(part, TensorDataset) and len(part.tensors) == 2:
        return part.tensors[0], part.tensors[1]
    try:
        samples = list(part) if isinstance(part, IterableDataset) else [part[place] for place in range(len(part))]
        batches = [collate(samples[start : start + _CHUNK]) for start in range(0, len(samples), _CHUNK)]
    except Exception as error:  # it is the user's code
        reason = " ".join(str(error).split())[:160]
        raise BadInput(f"{where}: its samples cannot be stacked ({type(error).__name__}: {reason})") from error
    if not batches or not all(_is_pair(batch) for batch in batches):
        what = "has no samples" if not batches else "its samples are not pairs (x, y)"
        raise BadInput(f"{where}: {what}; give a Dataset whose samples are pairs (x, y)")
    xs, ys = ([_array(where, batch[place]) for batch in batches] for place in (0, 1))
    return np.concatenate(xs), np.concatenate(ys)


def _array(where: str, values: Any) -> Array:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    elif hasattr(values, "to_numpy"):
        values = values.to_numpy()
    try:
        array: Array = np.asarray(values)
    except ValueError as error:
        raise BadInput(f"{where}: its rows differ in length; give samples of one shape") from error
    if array.dtype.kind == "O" and all(isinstance(value, str) for value in array.flat):
        return array.astype(str)
    if array.dtype.kind not in "iufbUS":
        kinds = sorted({type(value).__name__ for value in array.flat}) if array.dtype.kind == "O" else []
        what = f" with {' and '.join(kinds[:3])}" if kinds else ""
        raise BadInput(
            f"{where}: has dtype {array.dtype}{what}; give numbers, or text for labels and users, of one kind"
        )
    return array


def _scaled(where: str, x: Array) -> Array:
    """Return bytes as numbers in [0, 1], images with their channels first; all else as it is."""
    if x.dtype != np.uint8:
        return x
    return x.astype(np.float32) / np.float32(255) if x.ndim == 2 else images_to_float(where, x)


def _users(user: Any, samples: int) -> Array:
    if isinstance(user, str):
        raise BadInput(f"user = {user!r}: data have no columns; give an array that says whose each sample is")
    whose = _array("user", user)
    if whose.shape != (samples,):
        raise BadInput(f"user: has shape {list(whose.shape)}, and there are {samples} samples; give one for each")
    return whose


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _is(value: Any, package: str, name: str) -> bool:
    """Say whether a value is of a class of a package, which is not imported for it."""
    module = sys.modules.get(package)
    return module is not None and isinstance(value, getattr(module, name))
