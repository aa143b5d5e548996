"""Tables, one row per sample: of files, in memory, and of Hugging Face.

Columns with numbers, or true and false, are features. A column with text is one feature per value, 1 where the row has
it: at most 50 values, and no more than half as many as rows. A single column with longer text, or the one that
`data.text` names, is text to classify; with `data.text` and no `data.label` its next tokens are predicted. Whatever a
column cannot be made into numbers by is an error that names the column.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from personafl.core.reading import Reading
from personafl.core.split import listed
from personafl.data.sources.dataset import Array, Dataset, checked
from personafl.data.sources.documents import next_tokens, numbered
from personafl.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

LABELS = ("label", "labels", "fine_label", "character", "y", "target", "class")
USERS = ("user", "user_id", "writer_id", "client_id", "speaker_id")
TEXTS = ("text", "sentence", "content")
_HALVES = {"train": 0, "0": 0, "false": 0, "test": 1, "1": 1, "true": 1}
_VALUES = 50  # of a text column that becomes features
_COUNTED = 20  # rows, from which a column that counts them is taken for an index


def from_frames(
    where: str,
    name: str,
    frames: "Sequence[pd.DataFrame]",
    reading: Reading,
    label_names: Sequence[str] = (),
    x: Array | None = None,
) -> Dataset:
    """Make a data set of tables with the same columns; a second one holds the test half. `x` are inputs beside them."""
    import pandas as pd

    frame = pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]
    if not len(frame):
        raise BadInput(f"{where}: holds no rows; check the file")
    split: Array | None = np.repeat(np.arange(len(frames)), [len(part) for part in frames]) if frames[1:] else None
    labels = _label_columns(where, frame, reading)
    user = _chosen(where, frame, "user", reading, USERS)
    half = _chosen(where, frame, "split", reading, ("split",)) if split is None else None
    if not labels and reading.who != "predict" and reading.text is None:
        raise BadInput(
            f"{where}: has columns {listed(list(map(str, frame.columns)))}; say which to predict with data.label, or "
            f"of which text the next tokens with data.text"
        )
    taken = [*labels, *(column for column in (user, half, reading.text, reading.prompt) if column is not None)]
    if twice := [column for column in taken if taken.count(column) > 1]:
        raise BadInput(
            f"{where}: column {twice[0]!r} cannot be two of data.label, data.user, data.split, data.text and "
            f"data.prompt; name another"
        )
    if half is not None:
        split = _halves(f"{where}: column {half!r}", frame[half])
    whose = None if user is None else _values(f"{where}: column {user!r}", frame[user]).astype(str)
    label: Any = reading.label if isinstance(reading.label, tuple) else next(iter(labels), None)
    found: dict[str, Any] = {"label": label, "user": user, "split": half}
    if reading.text is not None and reading.label is None:  # to predict for, texts to classify have no labels
        texts, prompts = (_texts(where, frame, key, reading) for key in ("text", "prompt"))
        known = reading.model_copy(update=found)
        return next_tokens(where, name, texts or (), known, prompts=prompts, user=whose, split=split)
    vocabulary: int | None = None
    if reading.text is not None:
        x, vocabulary = _to_classify(where, frame, reading)
    elif x is None:
        names = _features(where, frame, taken, reading)
        x, vocabulary, more = _inputs(where, frame, names, None if split is None else split == 0, reading)
        found |= more
    y = _targets(where, frame, labels, reading) if labels else None
    return checked(
        f"{where}: column {', '.join(map(repr, labels))}" if labels else where,
        name=name,
        x=x,
        y=y,
        user=whose,
        split=split,
        label_names=label_names,
        target_names=labels,
        vocabulary=vocabulary,
        reading=reading.model_copy(update=found),
    )


def _chosen(where: str, frame: "pd.DataFrame", key: str, reading: Reading, known: Sequence[str]) -> str | None:
    """Return the column for a key of the recipe, or one that is called as such columns often are."""
    columns = [str(name) for name in frame.columns]
    given: str | None = getattr(reading, key)
    if given is None:
        return next((name for name in known if name in columns), None)
    if given in columns:
        return given
    if reading.who == "predict" or (reading.who == "device" and key == "user"):
        return None
    raise BadInput(f"{where}: data.{key} = {given!r} is no column; {did_you_mean(given, columns)}")


def _label_columns(where: str, frame: "pd.DataFrame", reading: Reading) -> list[str]:
    """Return the columns that are predicted: none (of a text that is named the next tokens are), one or several."""
    if reading.text is not None and reading.label is None:
        return []
    if not isinstance(reading.label, tuple):
        label = _chosen(where, frame, "label", reading, LABELS)
        return [] if label is None else [label]
    columns = [str(name) for name in frame.columns]
    unknown = [name for name in reading.label if name not in columns]
    if unknown and reading.who == "predict":
        return []
    if unknown:
        raise BadInput(
            f"{where}: data.label has {unknown[0]!r}, which is no column; {did_you_mean(unknown[0], columns)}"
        )
    return list(reading.label)


def _targets(where: str, frame: "pd.DataFrame", labels: list[str], reading: Reading) -> Array:
    """Return labels [rows], or those of several columns [rows, columns], which are numbers or true and false."""
    parts = [_values(f"{where}: column {name!r}", frame[name]) for name in labels]
    if not isinstance(reading.label, tuple):
        return parts[0]
    for name, part in zip(labels, parts, strict=True):
        if part.dtype.kind not in "iuf" and not np.isin(part, ("True", "False")).all():
            raise BadInput(f"{where}: column {name!r} has text, and several labels are numbers; leave it out")
    numbers = [part == "True" if part.dtype.kind == "U" else part.astype(np.float64) for part in parts]
    marks = all(np.isin(part, (0, 1)).all() for part in numbers)
    return np.stack(numbers, axis=1).astype(np.bool_ if marks and reading.task == "auto" else np.float64)


def _texts(where: str, frame: "pd.DataFrame", key: str, reading: Reading) -> list[str] | None:
    """Return the texts of the column that a key names; None: it names none."""
    name, columns = getattr(reading, key), [str(column) for column in frame.columns]
    if name is None:
        return None
    if name not in columns:
        raise BadInput(f"{where}: data.{key} = {name!r} is no column; {did_you_mean(name, columns)}")
    values: list[Any] = frame[name].tolist()
    for row, value in enumerate(values, start=1):
        if not isinstance(value, str):
            what = f"{type(value).__name__} {value!r:.40}"
            raise BadInput(f"{where}: column {name!r}: row {row} has no text, but {what}; correct or remove it")
    return values


def _to_classify(where: str, frame: "pd.DataFrame", reading: Reading) -> tuple[Array, int]:
    """Return the tokens of the column that `data.text` names, and how many different ones there are."""
    for key in ("prompt", "features", "drop", "categories"):
        if getattr(reading, key):
            raise BadInput(f"{where}: data.{key} says nothing of a text that is classified by data.label; remove it")
    return numbered(_texts(where, frame, "text", reading) or (), reading)


def _features(where: str, frame: "pd.DataFrame", taken: list[str], reading: Reading) -> list[str]:
    columns = [str(name) for name in frame.columns]
    for key in ("features", "drop", "categories", "missing") if reading.who == "all" else ("features",):
        given = getattr(reading, key) or ()
        for name in () if isinstance(given, str) else given:
            if name not in columns and reading.who == "predict":
                raise BadInput(f"{where}: has no column {name!r}, which the model takes; {did_you_mean(name, columns)}")
            if name not in columns:
                raise BadInput(f"{where}: data.{key} has {name!r}, which is no column; {did_you_mean(name, columns)}")
            if name in taken:
                raise BadInput(f"{where}: data.{key} has {name!r}, which is the label, user or split; take it out")
    every = reading.features if reading.features is not None else [name for name in columns if name not in taken]
    names = [name for name in every if name not in reading.drop]
    if not names:
        raise BadInput(f"{where}: has no column besides label, user and split; there is nothing to learn from")
    if reading.who == "device" and reading.features is None:
        raise BadInput(
            f"{where}: the server's recipe does not say which columns are inputs, and in which order; add "
            f"data.features = {names} to it".replace("'", '"')
        )
    return names


def _inputs(
    where: str, frame: "pd.DataFrame", names: list[str], train: Array | None, reading: Reading
) -> tuple[Array, int | None, dict[str, Any]]:
    """Return the inputs of all rows, and the vocabulary where they are tokens.

    Also what a reader of another file must know to make the same of it.
    """
    kept, categories = dict(reading.categories or {}), {}
    found: dict[str, Any] = {"features": tuple(names)}
    only = frame[names[0]]
    alone = len(names) == 1 and names[0] not in kept and _is_text(only)
    if alone:
        _check_text(f"{where}: column {names[0]!r}", only, names[0])
    if alone and (names[0] in TEXTS or reading.who != "all" or not _few(only)):
        return *numbered(only.fillna("").astype(str).tolist(), reading), found
    parts: list[NDArray[np.float32]] = []
    fill: dict[str, float] = dict(reading.missing) if isinstance(reading.missing, dict) else {}
    wrong: dict[str, BadInput] = {}
    for name in names:
        column, at = frame[name], f"{where}: column {name!r}"
        try:
            if name in kept or _is_text(column):
                if name not in kept:
                    _check_text(at, column, name)
                categories[name] = kept.get(name) or _categories(at, column, name, reading)
                parts.append(_one_hot(at, column, name, categories[name], reading))
            else:
                counted = reading.features is None
                parts.append(_numbers(at, column, name, train, fill, reading, counted)[:, None])
        except BadInput as error:
            wrong[name] = error
    _check_all(wrong)
    if reading.missing != "error":
        found["missing"] = fill
    return np.concatenate(parts, axis=1), None, found | {"categories": categories or None}


def _check_all(wrong: dict[str, BadInput]) -> None:
    """Say what is wrong with the first column, and which others cannot be read either."""
    if len(wrong) > 1:
        first, *others = wrong
        raise BadInput(f"{wrong[first]}; nor can these columns be used as they are: {listed(others)}")
    for error in wrong.values():
        raise error


def _numbers(
    at: str,
    column: "pd.Series[Any]",
    name: str,
    train: Array | None,
    fill: dict[str, float],
    reading: Reading,
    counted: bool,
) -> NDArray[np.float32]:
    import pandas as pd

    drop = f'leave the column out with data.drop = ["{name}"]'
    if pd.api.types.is_datetime64_any_dtype(column) or pd.api.types.is_timedelta64_dtype(column):
        raise BadInput(f"{at}: holds dates; {drop}, or make numbers of them")
    try:
        if pd.api.types.is_complex_dtype(column):
            raise TypeError
        values = pd.to_numeric(column).to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError):
        kinds = list(dict.fromkeys(type(value).__name__ for value in column))
        raise BadInput(f"{at}: holds {' and '.join(kinds[:3])}, and numbers or text are read; {drop}") from None
    gone = np.isnan(values)
    if gone.any():
        if reading.missing == "error":
            raise BadInput(
                f'{at}: {int(gone.sum())} of {len(values)} values are missing; fill them with data.missing = "mean", '
                f"remove these rows, or {drop}"
            )
        if reading.missing == "mean" and reading.who == "device":
            raise BadInput(
                f"{at}: values are missing; say in the server's recipe with which number all devices fill them, "
                f"data.missing = {{{name} = 0}}"
            )
        if reading.missing != "mean" and name not in fill:
            raise BadInput(f"{at}: {int(gone.sum())} of {len(values)} values are missing; add it to data.missing")
        seen = values[~gone] if train is None else values[~gone & train]
        if reading.missing == "mean" and not len(seen):
            raise BadInput(f"{at}: all values are missing; {drop}")
        if reading.missing == "mean":
            fill[name] = float(seen.mean())
        values = np.where(gone, fill[name], values)
    with np.errstate(over="ignore", invalid="ignore"):
        if counted and len(values) >= _COUNTED and (np.diff(values) == 1).all():
            raise BadInput(f"{at}: counts the rows, which says nothing of them; {drop}, or list data.features")
        single = values.astype(np.float32)
    if not np.isfinite(single).all():
        bad = int(np.argmin(np.isfinite(single)))
        raise BadInput(f"{at}: row {bad + 1} has {values[bad]}, which no model can learn from; correct it, or {drop}")
    return single


def _check_text(at: str, column: "pd.Series[Any]", name: str) -> None:
    """Refuse a column with numbers but for a few values."""
    import pandas as pd

    values = column.dropna().astype(str)
    other = pd.to_numeric(values, errors="coerce").isna().to_numpy()
    if len(values) and not other.any() and not isinstance(column.dtype, pd.CategoricalDtype):
        raise BadInput(
            f"{at}: has numbers as text, such as {values.iloc[0]!r}; make numbers of them, or, if they are names, list "
            f'these in data.categories, or leave it out with data.drop = ["{name}"]'
        )
    if 0 < other.sum() < len(values) / 2:
        row = values.index[int(np.argmax(other))]
        raise BadInput(
            f"{at}: has numbers but for {int(other.sum())} values, such as {values[row]!r} in row {row + 1}; correct "
            f'them, or leave it out with data.drop = ["{name}"]'
        )


def _categories(at: str, column: "pd.Series[Any]", name: str, reading: Reading) -> tuple[str, ...]:
    values, drop = column.dropna().astype(str), f'leave it out with data.drop = ["{name}"]'
    if reading.who == "device":
        raise BadInput(
            f"{at}: has text, and the server's recipe does not say which values there are; add "
            f"data.categories.{name} = [...] to it"
        )
    if not _few(column):
        raise BadInput(
            f"{at}: has {values.nunique()} different texts in {len(column)} rows, such as {values.iloc[0]!r}; {drop}, "
            f'or learn from this text alone with data.features = ["{name}"]'
        )
    return tuple(sorted(values.unique()))


def _one_hot(
    at: str, column: "pd.Series[Any]", name: str, values: tuple[str, ...], reading: Reading
) -> NDArray[np.float32]:
    """Return [rows, values]: 1 where the row has the value; where it has none, 0 in all."""
    import pandas as pd

    gone = column.isna().to_numpy()
    if gone.any() and reading.missing == "error":
        raise BadInput(
            f"{at}: {int(gone.sum())} of {len(column)} values are missing; leave such rows without a value with "
            f'data.missing = "mean", or leave the column out with data.drop = ["{name}"]'
        )
    place = pd.Index(values).get_indexer(pd.Index(column.astype(str)))
    unknown = ~gone & (place < 0)
    if unknown.any() and reading.who != "predict":
        value = str(column[int(np.argmax(unknown))])
        raise BadInput(f"{at}: {value!r} is none of data.categories.{name}, {listed(values)}; add it there")
    place[gone] = -1
    table: NDArray[np.float32] = (place[:, None] == np.arange(len(values))).astype(np.float32)
    return table


def _halves(at: str, column: "pd.Series[Any]") -> Array:
    halves = column.astype(str).str.strip().str.lower().map(_HALVES)
    if halves.isna().any():
        value = column[int(np.argmax(halves.isna().to_numpy()))]
        raise BadInput(f"{at}: has {str(value)!r}; mark each row with train or test, or with 0 or 1")
    return halves.to_numpy(dtype=np.int64)


def _values(at: str, column: "pd.Series[Any]") -> Array:
    """Return labels or users as whole numbers, fractions or text."""
    import pandas as pd

    gone = int(column.isna().sum())
    if gone:
        how = "missing (in files also NA, None, null, nan and ? mean that)"
        raise BadInput(f"{at}: {gone} of {len(column)} values are {how}; remove these rows or fill them in")
    if pd.api.types.is_bool_dtype(column) or not pd.api.types.is_numeric_dtype(column):
        words = column.map(lambda value: isinstance(value, str)).to_numpy(dtype=bool)
        text = column.astype(str)
        if both := sorted(set(text[words]).intersection(text[~words])):
            raise BadInput(
                f"{at}: has {both[0]} as text and as {type(column[~words].iloc[0]).__name__}; make all of "
                f"the column text, .astype(str)"
            )
        return text.to_numpy(dtype=str)
    values: Array = column.to_numpy()
    whole = values.dtype.kind != "f" or bool((values == np.floor(values)).all())
    return values.astype(np.int64) if whole else values


def _is_text(column: "pd.Series[Any]") -> bool:
    """Whether a column has text; what else pandas has no type for (lists, decimals) has not."""
    import pandas as pd

    if isinstance(column.dtype, pd.CategoricalDtype):
        return True
    return pd.api.types.infer_dtype(column, skipna=True) in ("string", "mixed-integer")


def _few(column: "pd.Series[Any]") -> bool:
    return int(column.nunique()) <= min(_VALUES, max(2, len(column) // 2))
