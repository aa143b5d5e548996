"""The updates that were taken in the open round: end to end in one file, and the journal says where each of them is.

Those that wait at the same time are made durable together, for that takes longest. Only what the journal speaks of
counts: what a crash leaves behind it is written over.
"""

import json
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from personafl.core import wire
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Update, digest_of
from personafl.errors import BadInput
from personafl.storage.files import storage, sync, write_from
from personafl.system import give_memory_back

_MANY = 2**26  # bytes of updates that came and went, after which memory is given back
_DTYPES = {  # as safetensors names them
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
Places = dict[int, tuple[int, int]]  # number of a device -> where its update begins, and its size


@dataclass(frozen=True)
class Offer:
    """An update that a device sent."""

    identity: Identity
    update: Update
    payload: bytes
    digest: str

    @property
    def number(self) -> int:
        """Whose it is."""
        assert self.identity.number is not None
        return self.identity.number


class Updates:
    """The updates of the round that is open."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._round = directory, 0
        self._places: Places = {}
        self._end = 0
        self._came = 0  # bytes since memory was last given back

    def begin(self, round_: int, entries: Iterable[Mapping[str, Any]] = ()) -> None:
        """Begin a round, or go on with it from what the journal says was accepted."""
        self._round = round_
        self._places = {entry["number"]: (entry["begin"], entry["size"]) for entry in entries if "begin" in entry}
        self._end = max((begin + size for begin, size in self._places.values()), default=0)

    def write(self, offers: Sequence[Offer]) -> list[dict[str, Any]]:
        """Write updates, all or none, and return what the journal is to say of them; they count once it does."""
        begin, facts = self._end, []
        for offer in offers:
            size, whose = len(offer.payload), {"number": offer.number, "name": offer.identity.name}
            alone = {"alone": offer.update.alone} if offer.update.alone else {}
            facts.append({"round": self._round, **whose, "digest": offer.digest, "begin": begin, "size": size, **alone})
            begin += size
        write_from(self._path, self._end, [offer.payload for offer in offers])
        if not self._end:
            with storage(self._directory):
                sync(self._directory)
        self._came += begin - self._end
        if self._came > _MANY:
            self._came = 0
            give_memory_back()
        return facts

    def keep(self, facts: Sequence[Mapping[str, Any]]) -> None:
        """Note what the journal says now."""
        self._places |= {fact["number"]: (fact["begin"], fact["size"]) for fact in facts}
        self._end = sum(self._places[facts[-1]["number"]])

    def read(self, number: int, digest: str) -> bytes:
        """Return an update that was checked when it came, if it is still the same."""
        path, (begin, size) = self._path, self._places.get(number, (0, -1))
        if number not in self._places:  # of version 0.1
            path = self._directory / f"{self._round:06d}-{number:06d}.safetensors"
        return still_there(path, digest, begin, size)

    def read_all(self, digests: Mapping[int, str]) -> Iterator[tuple[int, bytes]]:
        """Yield these updates in their order; the next one is read and hashed meanwhile."""
        with ThreadPoolExecutor(1, "updates") as reader:
            ahead: list[tuple[int, Future[bytes]]] = []
            for number, digest in digests.items():
                ahead.append((number, reader.submit(self.read, number, digest)))
                if len(ahead) > 1:
                    first, data = ahead.pop(0)
                    yield first, data.result()
            for last, data in ahead:
                yield last, data.result()

    def whole(self) -> memoryview:
        """Return the file of all updates as memory: of pieces each would have a file descriptor while it is held."""
        return _map(self._path, 0, self._end)

    def mapped(
        self, number: int, digest: str, again: bool = False, whole: memoryview | None = None
    ) -> dict[str, Tensor]:
        """Return the tensors of an update where they are in the file, or in `whole`; hashed, but not `again`."""
        if number not in self._places:
            return wire.decode_named(self.read(number, digest))
        begin, size = self._places[number]
        data = _map(self._path, begin, size) if whole is None else whole[begin : begin + size]
        if not again:
            check_same(self._path, data, digest)
        return _views(data)

    def clear(self) -> None:
        """Remove them all."""
        with storage(self._directory):
            for path in self._directory.iterdir():
                path.unlink()
        self._places, self._end = {}, 0

    @property
    def _path(self) -> Path:
        return self._directory / f"{self._round:06d}.updates"


def still_there(path: Path, digest: str, begin: int = 0, size: int = -1) -> bytes:
    """Return what was checked when it came and put into a file, or a piece of it, if it is still the same."""
    data = b""
    if path.exists():
        with storage(path), path.open("rb") as file:
            file.seek(begin)
            data = file.read(size)
    check_same(path, data, digest)
    return data


def check_same(path: Path, data: bytes | memoryview, digest: str) -> None:
    """Fail if what was put into a file is not what was checked when it came."""
    if digest_of(data) != digest:
        raise BadInput(
            f"{path}: was lost or damaged since it was accepted; put a copy back, or begin anew with another --out"
        )


def _map(path: Path, begin: int, size: int) -> memoryview:
    """Return a piece of a file as memory, read as it is looked at; less, if the file was cut."""
    first = begin - begin % mmap.ALLOCATIONGRANULARITY
    end = min(begin + size, path.stat().st_size if path.exists() else 0)
    if end <= begin:
        return memoryview(b"")
    with storage(path), path.open("rb") as file:  # tensors are of memory that may be written
        whole = memoryview(mmap.mmap(file.fileno(), end - first, access=mmap.ACCESS_COPY, offset=first))
    return whole[begin - first :]


def _views(data: memoryview) -> dict[str, Tensor]:
    """Return the tensors of a flat message that was found right, by name, in the memory where it is."""
    begin = 8 + int.from_bytes(data[:8], "little")
    described = json.loads(bytes(data[8:begin]))
    return {name: _view(data[begin:], about) for name, about in described.items() if name != "__metadata__"}


def _view(data: memoryview, about: dict[str, Any]) -> Tensor:
    dtype, (begin, end) = _DTYPES[about["dtype"]], about["data_offsets"]
    if begin == end:
        return torch.empty(about["shape"], dtype=dtype)
    flat = torch.frombuffer(data[begin:end], dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).reshape(about["shape"])
