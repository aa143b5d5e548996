"""AG-News-style CSV: class (from 1), title, description. Zhang, Zhao, LeCun 2015."""

import csv
from pathlib import Path

import numpy as np

from personafl.core.reading import Reading
from personafl.data.sources.dataset import Dataset, checked
from personafl.data.sources.documents import numbered
from personafl.errors import BadInput


def is_news(path: Path) -> bool:
    """Return whether a file has that layout by its first line: a class, or a column called Class …, before texts."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        first = next(csv.reader(file), []) or [""]
    start, others = first[0].strip().lower(), [part.strip() for part in first[1:]]
    texts = len(others) in (1, 2) and not any(part.replace(".", "").isdigit() for part in others)
    return texts and (start.isdigit() or start in ("class index", "class"))


def read_news(path: Path, reading: Reading) -> Dataset:
    """Read one .csv, or a folder with train.csv, test.csv and optionally classes.txt (one name per line)."""
    files = [path]
    if path.is_dir():
        files = [path / name for name in ("train.csv", "test.csv") if (path / name).is_file()]
    halves = [_rows(file) for file in files]
    names = path / "classes.txt"
    x, vocabulary = numbered([text for half in halves for _, text in half], reading)
    return checked(
        str(path),
        name=path.stem,
        x=x,
        y=np.array([label for half in halves for label, _ in half], dtype=np.int64),
        split=np.repeat(np.arange(len(halves)), [len(half) for half in halves]) if len(files) > 1 else None,
        label_names=names.read_text("utf-8").split("\n")[:-1] if path.is_dir() and names.is_file() else (),
        vocabulary=vocabulary,
        reading=reading,
    )


def _rows(path: Path) -> list[tuple[int, str]]:
    rows = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.reader(file), start=1):
                if not row or (number == 1 and not row[0].strip().isdigit()):
                    continue  # a blank line, or a header
                if len(row) < 2 or not row[0].strip().isdigit() or int(row[0]) < 1:
                    raise BadInput(
                        f"{path}: line {number} is not class,title,description with a class from 1; correct it"
                    )
                rows.append((int(row[0]) - 1, " ".join(row[1:])))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path}: cannot be read as UTF-8 CSV ({error}); check the file") from None
    if not rows:
        raise BadInput(f"{path}: holds no rows; check the file")
    return rows
