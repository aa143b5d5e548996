"""What a device keeps: its personal state, and the update that it has not been told the fate of, in one file.

Training writes the new state and the update together, as pending. If the server accepts the update, the new state
becomes the state; if not, the old one stays, as if the device had not been selected. So the device and the server never
disagree about a round, whenever either is killed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core import wire
from personafl.errors import BadInput
from personafl.storage.files import atomic_write, storage

Entry = dict[str, Tensor]  # a state, flattened to {path: tensor}
_FORMAT = "personafl device 1"


@dataclass(frozen=True)
class Pending:
    """An update that was trained and may have been sent."""

    round: int
    model: str
    update: bytes
    state: Entry  # the state after it


class DeviceState:
    """The file of one device in one run. It has the parts of a `Store` that a simulation of one client uses."""

    def __init__(self, directory: Path, run: str, number: int) -> None:
        self._path = directory / "state.safetensors"
        self.run, self._number = run, number
        self.entry: Entry | None = None  # None: it has not taken part yet
        self.rounds: list[int] = []  # in which its updates were accepted
        self.pending: Pending | None = None
        self.finished = False  # it has its final model, and is done
        with storage(directory):
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o700)
        if self._path.exists():
            self._read()

    @property
    def known(self) -> bool:
        """Whether this device has a state: once it has taken part. One without tensors is like none."""
        return bool(self.entry)

    def has(self, clients: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Say which clients have a state here: this device alone is asked for."""
        return np.full(len(clients), self.known)

    def take(self, clients: NDArray[np.int64]) -> Entry:
        """Return the state as a stack of one."""
        (_,) = clients
        assert self.entry
        return {path: leaf.unsqueeze(0) for path, leaf in self.entry.items()}

    def commit(self, pending: Pending) -> None:
        """Keep what a round of training made, before anything is sent."""
        self.pending = pending
        self._write()

    def accepted(self) -> None:
        """Go on from the new state."""
        assert self.pending is not None
        self.entry = self.pending.state
        self.rounds.append(self.pending.round)
        self.pending = None
        self._write()

    def refused(self) -> None:
        """Go on from the old state."""
        self.pending = None
        self._write()

    def finish(self) -> None:
        """Note that the final model is kept: the server is not needed any more."""
        self.finished = True
        self._write()

    @classmethod
    def is_finished(cls, directory: Path) -> bool:
        """Say whether the device that a directory belongs to is done."""
        path = directory / "state.safetensors"
        return path.exists() and bool(_about(path)[0]["finished"])

    def _write(self) -> None:
        pending = self.pending
        named = {f"state/{path}": leaf for path, leaf in (self.entry or {}).items()}
        about = {
            "run": self.run,
            "number": self._number,
            "known": self.entry is not None,
            "rounds": self.rounds,
            "finished": self.finished,
            "pending": None if pending is None else {"round": pending.round, "model": pending.model},
        }
        if pending is not None:
            named |= {f"next/{path}": leaf for path, leaf in pending.state.items()}
            named["update"] = torch.frombuffer(bytearray(pending.update), dtype=torch.uint8)
        atomic_write(self._path, safetensors.torch.save(named, {"format": _FORMAT, "about": json.dumps(about)}))

    def _read(self) -> None:
        about, data = _about(self._path)
        named = wire.decode_named(data)
        if (about["run"], about["number"]) != (self.run, self._number):
            raise BadInput(f"{self._path}: is the state of another run or device; choose another --state")
        self.rounds, self.finished = about["rounds"], about["finished"]
        self.entry = _under(named, "state/") if about["known"] else None
        if about["pending"] is not None:
            update = named["update"].numpy().tobytes() if "update" in named else b""
            self.pending = Pending(about["pending"]["round"], about["pending"]["model"], update, _under(named, "next/"))


def _about(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return what a state file says about itself, and its bytes."""
    try:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        kept = json.loads(data[8 : 8 + length])["__metadata__"]
        if kept["format"] != _FORMAT:
            raise ValueError("another format")
        return json.loads(kept["about"]), data
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{path}: cannot be read ({error}); it was not written by this device") from error


def _under(named: Entry, prefix: str) -> Entry:
    return {name.removeprefix(prefix): leaf for name, leaf in named.items() if name.startswith(prefix)}
