"""Files of tables: CSV, TSV, Parquet and JSON lines (an object per line)."""

import csv
import gzip
import json
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from personafl.core.reading import Reading
from personafl.data.sources.dataset import Dataset
from personafl.data.sources.table import from_frames
from personafl.data.sources.text import check_unicode
from personafl.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".jsonl")


def is_table(path: Path) -> bool:
    """Return whether a file is one by its name."""
    return path.name.lower().endswith(SUFFIXES)


def read_table(path: Path, reading: Reading) -> Dataset:
    """Read a table, or a folder's train and test tables."""
    files = halves_of(path) if path.is_dir() else [path]
    frames = [_frame(file) for file in files]
    first = set(frames[0].columns)
    for file, frame in zip(files, frames, strict=True):
        if other := sorted(first.symmetric_difference(frame.columns)):
            raise BadInput(f"{file}: {files[0].name} and {file.name} do not both have column {other[0]!r}; add it")
    return from_frames(str(path), path.name.split(".")[0], frames, reading)


def halves_of(folder: Path) -> list[Path]:
    """Return the tables train and test of a folder."""
    found = [folder / f"{half}{suffix}" for half in ("train", "test") for suffix in SUFFIXES]
    return [path for path in found if path.is_file()]


def _frame(path: Path) -> "pd.DataFrame":
    import pandas as pd

    if path.suffix == ".jsonl":
        return _lines(path)
    try:
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            sep, decimal = _marks(path)
            frame = pd.read_csv(
                path,
                sep=sep,
                decimal=decimal,
                encoding="utf-8-sig",
                na_values=["?"],
                low_memory=False,
                index_col=False,
                skipinitialspace=True,
            ).rename(columns=lambda name: str(name).strip())
    except ImportError:
        raise BadInput(f"{path}: needs pyarrow, pip install 'personafl[parquet]'; or save it as .csv") from None
    except pd.errors.ParserWarning:
        more = "its lines have more fields than the first line has names; name every column there"
        raise BadInput(f"{path}: {more}") from None
    except pd.errors.EmptyDataError:
        raise BadInput(f"{path}: is empty; check the file") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from None
    except (OSError, ValueError, EOFError) as error:  # pandas' ParserError and pyarrow's ArrowInvalid are ValueErrors
        reason = " ".join(str(error).split())[:160]
        kind = "Parquet" if path.suffix == ".parquet" else "UTF-8 CSV"
        raise BadInput(f"{path}: cannot be read as {kind} ({reason}); check the file") from None
    if all(_is_number(str(name)) for name in frame.columns):
        raise BadInput(f"{path}: its first line has numbers; put the columns' names there")
    return frame


def _marks(path: Path) -> tuple[str, str]:
    """Return what separates fields, by the first line, and what decimals: between semicolons it may be a comma."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        line, more = file.readline(100_000), file.read(100_000)
    mark = "\t" if ".tsv" in path.suffixes else max((",", ";", "\t"), key=lambda sign: line.count(sign.encode()))
    names = [name.strip() for name in next(csv.reader([line.decode("utf-8-sig")], delimiter=mark), [])]
    if twice := [name for name in names if name and names.count(name) > 1]:
        raise BadInput(f"{path}: two columns are called {twice[0]!r}; give each a name of its own")
    return mark, "," if mark == ";" and re.search(rb"\d,\d", more) else "."


def _lines(path: Path) -> "pd.DataFrame":
    """Return the objects of a file as rows; what one of them lacks is missing there."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    rows.append(_object(path, number, line))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read as UTF-8 ({error}); check the file") from None
    if not rows:
        raise BadInput(f"{path}: holds no lines; check the file")
    for number, row in enumerate(rows, start=1):
        check_unicode(f"{path}: object {number}", [value for value in row.values() if isinstance(value, str)])
    return pd.DataFrame(rows)


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "too deep"
        raise BadInput(f"{path}: line {number} is no JSON ({reason}); correct or remove it") from None
    if not isinstance(found, dict):
        raise BadInput(f'{path}: line {number} is a {type(found).__name__}, not an object; write {{"text": …}}')
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
