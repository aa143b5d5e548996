"""A chain of JSON lines: each has its number, the hash of all that stands before it, and a checksum of itself.

So a line that was changed, removed, repeated or moved is found, even if its checksum was made anew. Lines at the
beginning may have neither number nor hash, as journals of version 0.1 do: the first that has them speaks for those too.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any


@dataclass
class Chain:
    """How far a chain is: so many lines, and the hash of them all."""

    lines: int = 0
    head: str = sha256().hexdigest()
    begun: bool = False  # whether lines have hashes by now

    def line(self, entry: dict[str, Any]) -> bytes:
        """Return an entry as the line that would follow."""
        text = json.dumps({**entry, "line": self.lines + 1, "chain": self.head})
        return f'{text[:-1]}, "crc": {zlib.crc32(text.encode())}}}\n'.encode()

    def add(self, line: bytes) -> None:
        """Go on by a line."""
        self.lines, self.head = self.lines + 1, _following(self.head, line)

    def read(self, line: bytes) -> dict[str, Any]:
        """Go on by a line, and return its entry; fail with a `ValueError` if it cannot have been written there."""
        link = Link.of(line)
        if link.number is None:
            if self.begun:
                raise ValueError("it has no hash, and lines before it have one")
        elif (link.number, link.before) != (self.lines + 1, self.head):
            raise ValueError(f"it was written as line {link.number}, after others than those that are before it now")
        self.begun = link.number is not None
        self.add(line)
        return link.entry


@dataclass(frozen=True)
class Link:
    """A line of a chain; those of version 0.1 have no number."""

    entry: dict[str, Any]
    number: int | None
    before: str  # the hash of all before it
    text: bytes

    @classmethod
    def of(cls, line: bytes) -> Link:
        """Read a line; fail with a `ValueError` if its checksum is another."""
        try:
            entry: dict[str, Any] = json.loads(line)
            last = list(entry)[-1]
            # Also if a bit of its name is hit.
            told = entry.pop(last) if len(last) == 3 and isinstance(entry[last], int) else None
            whole = line.rstrip(b"\n").rpartition(b', "crc"')[0] + b"}"
            if told is not None and (last, told) != ("crc", zlib.crc32(whole)):
                raise ValueError("its checksum is another")
            before = str(entry.pop("chain", ""))
            number = int(entry.pop("line")) if before else None
        except (IndexError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"it is none of these lines: {error}") from error
        return cls(entry, number, before, line)

    @property
    def after(self) -> str:
        """The hash of it and of all before it."""
        return _following(self.before, self.text)


def faults(lines: Iterable[bytes]) -> Iterator[str]:
    """Say what is not as it was written, line by line."""
    links, start = [], Chain()
    for place, line in enumerate(lines, 1):
        try:
            link = Link.of(line)
        except ValueError as error:
            yield f"line {place} was changed ({error})"
            continue
        if link.number is not None:
            links.append(link)
        elif links:
            yield f"line {place} was put in: it has no hash, and lines before it have one"
        else:
            start.add(line)
    yield from _misplaced([link.number for link in links if link.number is not None])
    known = {link.number: link for link in links}
    first = known.get(start.lines + 1)
    if first is not None and first.before != start.head:
        yield f"line {start.lines} or one before it was changed" if start.lines else "line 1 was changed"
    for number in sorted(number for number in known if number is not None):
        if (following := known.get(number + 1)) is not None and following.before != known[number].after:
            yield f"line {number} was changed since line {number + 1} was written"
    wanted = range(start.lines + 1, max(filter(None, known), default=0))
    yield from (f"line {number} was removed" for number in wanted if number not in known)


def _misplaced(numbers: list[int]) -> Iterator[str]:
    highest, seen = 0, set[int]()
    for number in numbers:
        if number in seen:
            yield f"line {number} is there twice"
        elif number < highest:
            yield f"line {number} was moved: it stands after line {highest}"
        seen.add(number)
        highest = max(highest, number)


def _following(head: str, line: bytes) -> str:
    return sha256(head.encode() + line).hexdigest()
