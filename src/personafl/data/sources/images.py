"""Folders of images: DIR/CLASS/*.png, DIR/USER/CLASS/*.png, and either under DIR/train and DIR/test.

Grey if all images are, else RGB. All have one size, or `data.size` makes them so many pixels square.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from personafl.core.reading import Reading
from personafl.data.sources.dataset import Dataset, checked, images_to_float
from personafl.errors import BadInput

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
HALVES = {"train": 0, "training": 0, "test": 1, "testing": 1, "val": 1, "valid": 1, "validation": 1}
GREY = ("1", "L", "LA")
COLOUR = ("P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")


def image_files(folder: Path) -> list[Path]:
    """Return all images below a folder, in order."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def read_images(folder: Path, files: Sequence[Path], reading: Reading) -> Dataset:
    """Read a folder's images; the folder that an image is in is its class, the one above that its user."""
    places = [path.relative_to(folder).parts[:-1] for path in files]
    halves = None
    if all(place and place[0].lower() in HALVES for place in places):
        halves = np.array([HALVES[place[0].lower()] for place in places])
        tests = sorted({place[0] for place, half in zip(places, halves, strict=True) if half})
        if len(tests) > 1:
            raise BadInput(f"{folder}: has {' and '.join(tests)}; put the images of one of them into train")
        places = [place[1:] for place in places]
    for path, place in zip(files, places, strict=True):
        if len(place) != len(places[0]) or len(place) not in (1, 2, *((0,) if reading.who == "predict" else ())):
            raise BadInput(f"{path}: is not where images are read from; use {folder}/CLASS/… or {folder}/USER/CLASS/…")
    opened = [functools.partial(_opened, path) for path in files]
    return checked(
        str(folder),
        name=folder.name,
        x=images_to_float(str(folder), stacked([str(path) for path in files], opened, reading.size)),
        y=np.array([place[-1] for place in places]) if places[0] else None,
        user=np.array([place[0] for place in places]) if len(places[0]) == 2 else None,
        split=halves,
        reading=reading,
    )


def stacked(names: Sequence[str], images: Sequence[Callable[[], Any]], size: int | None) -> NDArray[np.uint8]:
    """Decode images to bytes [images, height, width(, 3)]: all are looked at first, so that nothing is done in vain."""
    width, height, grey = size or 0, size or 0, True
    for place, (name, image) in enumerate(zip(names, images, strict=True)):
        with _named(name), image() as found:
            if found.mode not in (*GREY, *COLOUR):
                raise BadInput(f"{name}: has pixels of kind {found.mode}; save it with 8 bits per channel")
            grey &= found.mode in GREY
            if size is None and place == 0:
                width, height = found.size
            elif size is None and found.size != (width, height):
                raise BadInput(
                    f"{name}: is {found.size[0]}×{found.size[1]} and {Path(names[0]).name} {width}×{height} pixels; "
                    f"resize all with data.size = 32, or another number of pixels"
                )
    room = len(names) * width * height * (1 if grey else 3) * 5  # bytes, and floats of them
    if room > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise BadInput(
            f"{names[0]}: {len(names)} images of {width}×{height} pixels take {room / 2**30:.0f} GiB of memory; "
            f"resize them with data.size = 64, say"
        )
    pixels = np.empty((len(names), height, width) if grey else (len(names), height, width, 3), np.uint8)
    for row, name, image in zip(pixels, names, images, strict=True):
        with _named(name), image() as found:
            plain = found.convert("L" if grey else "RGB")
            row[:] = plain if size is None else plain.resize((width, height))
    return pixels


def _opened(path: Path) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise BadInput(f"{path}: needs pillow, pip install 'personafl[images]'") from None
    return Image.open(path)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Name the image that cannot be decoded; Pillow raises SyntaxError for some damaged files."""
    try:
        yield
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        reason = str(error).split("\n")[0][:100]
        raise BadInput(f"{name}: is damaged or no image ({reason}); remove or replace it") from None
