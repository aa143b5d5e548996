"""A disk that is full for a while: from the n-th point of the writes under a folder on, some of them fail.

Points: before a new file is opened; before every os.write, and half-way through it; before every fsync, directory and
growth of a mapped file.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, Self


class Full:
    """Makes writes under a folder fail for want of space, in this process."""

    NAMES = ("open", "write", "fsync", "mkdir", "posix_fallocate")

    def __init__(self, folder: Path, at: int, length: int = 1, hit: Path | None = None) -> None:
        self.folder, self.at, self.length, self._hit = str(folder.resolve()) + os.sep, at, length, hit
        self.count = self.failures = 0
        self._real = {name: getattr(os, name) for name in self.NAMES}

    def __enter__(self) -> Self:
        for name in self.NAMES:
            setattr(os, name, getattr(self, name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def point(self) -> bool:
        """Count a point; say whether the disk is full there."""
        full = self.at <= self.count < self.at + self.length
        self.count += 1
        self.failures += full
        if full and self._hit is not None:
            self._hit.touch()
        return full

    def fail_at(self, place: Any) -> None:
        if self._inside(place) and self.point():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open(self, path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_CREAT and not os.path.exists(path):
            self.fail_at(path)
        return int(self._real["open"](path, flags, *rest, **named))

    def write(self, descriptor: int, data: Any) -> int:
        self.fail_at(descriptor)
        if self._inside(descriptor) and self.point():
            self._real["write"](descriptor, bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self._real["write"](descriptor, data))

    def fsync(self, descriptor: int) -> None:
        self.fail_at(descriptor)
        self._real["fsync"](descriptor)

    def mkdir(self, path: Any, *rest: Any, **named: Any) -> None:
        self.fail_at(path)
        self._real["mkdir"](path, *rest, **named)

    def posix_fallocate(self, descriptor: int, offset: int, length: int) -> None:
        self.fail_at(descriptor)
        self._real["posix_fallocate"](descriptor, offset, length)

    def _inside(self, place: Any) -> bool:
        if isinstance(place, int):
            place = os.readlink(f"/proc/self/fd/{place}")
        return (os.path.abspath(os.fsdecode(place)) + os.sep).startswith(self.folder)
