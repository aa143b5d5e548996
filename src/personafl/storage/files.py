"""Files that survive a crash: written whole or not at all, and in the order that the caller needs."""

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from personafl.errors import BadInput, Busy, StorageFailed
from personafl.storage.seals import opened_json, sealed_json


@contextlib.contextmanager
def storage(path: Path) -> Iterator[None]:
    """Turn the operating system's errors about a path into one line with a remedy."""
    try:
        yield
    except OSError as error:
        remedy = {
            errno.ENOSPC: "the disk is full: free some space",
            errno.EDQUOT: "the disk quota is used up: free some space",
            errno.EFBIG: "the file is larger than this system allows",
            errno.EROFS: "the file system is read-only: choose another --out",
            errno.EACCES: "no permission to write there: choose another --out",
            errno.EPERM: "no permission to write there: choose another --out",
            errno.EEXIST: "a file is in the way: choose another --out",
            errno.ENOTDIR: "a file is in the way: choose another --out",
        }.get(error.errno or 0, os.strerror(error.errno) if error.errno else str(error))
        raise StorageFailed(f"{path}: cannot be written, {remedy}") from error


@contextlib.contextmanager
def _opened(path: Path, flags: int, private: bool = False) -> Iterator[int]:
    """Open a file; a new one is its owner's alone, or for whom its directory is for."""
    descriptor = os.open(path, flags, 0o600 if private else path.parent.stat().st_mode & 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def atomic_write(path: Path, *parts: bytes | memoryview, alone: bool = True, private: bool = False) -> None:
    """Replace a file by parts, end to end: after a crash it holds the old bytes or the new ones, whole.

    Who may not be alone, as others may write the file at the same time, has a partial file of its own. A private file
    is for its owner only, wherever it lies.
    """
    temporary = path.with_name(f"{path.name}.partial" if alone else f"{path.name}.{os.getpid()}.partial")
    with storage(path):
        try:
            with _opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, private) as descriptor:
                for part in parts:
                    _write_all(descriptor, part)
                os.fsync(descriptor)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # a full disk needs the space
                temporary.unlink()
            raise
        sync(path.parent)


def append(path: Path, data: bytes, durable: bool) -> int:
    """Add bytes at the end, if asked for make all of the file durable, and return its length."""
    with storage(path), _opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as descriptor:
        _write_all(descriptor, data)
        if durable:
            os.fsync(descriptor)
        return os.fstat(descriptor).st_size


def write_from(path: Path, begin: int, parts: Sequence[bytes]) -> None:
    """Write parts end to end from a place in a file on, and make them durable; if that fails the file ends there."""
    with storage(path), _opened(path, os.O_WRONLY | os.O_CREAT) as descriptor:
        try:
            os.lseek(descriptor, begin, os.SEEK_SET)
            for part in parts:
                _write_all(descriptor, part)
            os.fsync(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):  # a full disk needs the space
                os.ftruncate(descriptor, begin)
            raise


def cut(path: Path, length: int) -> None:
    """Shorten a file that was only appended to; one that is not there begins empty."""
    with storage(path), _opened(path, os.O_WRONLY | os.O_CREAT) as descriptor:
        if os.fstat(descriptor).st_size < length:
            raise BadInput(f"{path}: shorter than the checkpoint says; it was changed since the run stopped")
        os.ftruncate(descriptor, length)
        os.fsync(descriptor)


@contextlib.contextmanager
def locked(directory: Path, remedy: str) -> Iterator[None]:
    """Hold a directory: two processes must not write there."""
    import fcntl  # not on Windows, where the command line must still be able to say so

    path = directory / "lock"
    with contextlib.ExitStack() as stack:
        with storage(path):
            descriptor = stack.enter_context(_opened(path, os.O_RDWR | os.O_CREAT))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 20).decode(errors="replace").strip()
            raise Busy(f"{directory}: another process{f' ({holder})' if holder else ''} {remedy}") from error
        with contextlib.suppress(OSError):  # on a full disk nobody learns who it is
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        yield


def reserve(path: Path, length: int) -> None:
    """Make a file so long, or a new one, with room on the disk: writing to a mapped file cannot report that it is full.

    Not every system can reserve room.
    """
    with storage(path), _opened(path, os.O_RDWR | os.O_CREAT) as descriptor:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, length)
        else:
            os.ftruncate(descriptor, length)


def sync(path: Path) -> None:
    """Make a file, or a directory's entries, durable."""
    with _opened(path, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace a JSON file; it has a line for each key, for indentation is slow and takes a line for each number."""
    lines = (f"{json.dumps(key)}: {json.dumps(value[key], sort_keys=True)}" for key in sorted(value))
    atomic_write(path, sealed_json("{\n" + ",\n".join(lines) + "\n}\n", path.name))


def read_json(path: Path) -> Any:
    """Read a JSON file that personafl wrote."""
    try:
        return opened_json(path.read_bytes(), path.name)
    except FileNotFoundError as error:
        raise BadInput(f"{path}: not found; is {path.parent} a run directory?") from error
    except (ValueError, OSError) as error:
        raise BadInput(f"{path}: cannot be read ({error}); put a copy back") from error


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
