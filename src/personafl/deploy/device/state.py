"""What a device keeps: its personal state, and the update that it has not been told the fate of, in one file.

Training writes the new state and the update together, as pending. If the server accepts the update, the new state
becomes the state; if not, the old one stays, as if the device had not been selected. So the device and the server never
disagree about a round, whenever either is killed.

    state-N-TAKEN.safetensors   the N-th that was written, after TAKEN accepted updates; the last is what counts

Where the last was damaged, the one before is used: either it has the update pending whose fate the server tells again,
or training is repeated. If the server went back to an earlier round, so does the device, to its state then; where it
has that no more, it begins like a newcomer.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core import wire
from personafl.deploy.device.tries import Tries
from personafl.errors import BadInput
from personafl.storage.files import atomic_write, storage
from personafl.storage.seals import is_sealed, sealed

Entry = dict[str, Tensor]  # a state, flattened to {path: tensor}
_FORMAT, _FIRST = "personafl device 2", "personafl device 1"  # the first has no checksum, and one file: _OLD
_OLD = "state.safetensors"
_Content = tuple[dict[str, Any], Entry]  # of a file: what it says about itself, and its tensors


@dataclass(frozen=True)
class Pending:
    """An update that was trained and may have been sent."""

    round: int
    model: str
    update: bytes
    state: Entry  # the state after it, and after what was trained alone since
    alone: tuple[int, ...] = ()  # rounds that were trained alone since


class _Kept(NamedTuple):
    """A file of a device's state; the last one that was written is the largest."""

    number: int
    taken: int  # updates that were accepted before
    path: Path


class DeviceState:
    """What one device keeps in one run. It has the parts of a `Store` that a simulation of one client uses."""

    def __init__(self, directory: Path, run: str, number: int, checkpoints: int = 1) -> None:
        """Read what is kept; `checkpoints` is how many rounds a server may go back to."""
        self.directory, self._checkpoints = directory, checkpoints
        self.run, self._number = run, number
        self.entry: Entry | None = None  # None: it has not taken part yet
        self.rounds: list[int] = []  # in which its updates were accepted
        self.alone: list[int] = []  # rounds since the last of them that were trained without contact
        self.pending: Pending | None = None
        self.opened = -1  # the last round of which a sum may be known that its update is in: it is in no other one
        self.tries = Tries()  # of the last round of which a sum was tried
        self.finished = False  # it has its final model, and is done
        self.home = run  # the run of the server that has it now: the first one's, until it moves
        self.note = ""  # what was wrong with the files, in a line
        with storage(directory):
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o700)
        files = _files(directory)
        found, self.note = _newest(files)
        self._damaged = files[:1] if self.note else []
        if found is not None:
            self._become(*found)

    @property
    def known(self) -> bool:
        """Whether this device has a state: once it has taken part. One without tensors is like none."""
        return bool(self.entry)

    def has(self, clients: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Say which clients have a state here: this device alone is asked for."""
        return np.full(len(clients), bool(self.newest))

    def take(self, clients: NDArray[np.int64]) -> Entry:
        """Return the state as a stack of one."""
        (_,) = clients
        assert self.newest
        return {path: leaf.unsqueeze(0) for path, leaf in self.newest.items()}

    @property
    def newest(self) -> Entry | None:
        """The state that training goes on from: where an update is pending, the one after it."""
        return self.entry if self.pending is None else self.pending.state

    @property
    def reached(self) -> int:
        """The last round that was trained; -1: none."""
        last = [*self.rounds[-1:], *self.alone[-1:]]
        return max(last if self.pending is None else [*last, self.pending.round, *self.pending.alone], default=-1)

    # What changes it; if it cannot be written, `write` may be tried again

    def commit(self, pending: Pending) -> None:
        """Keep what a round of training made, before anything is sent."""
        self.pending = pending
        self.write()

    def tried(self, tries: Tries) -> None:
        """Note how far the pending update is in the tries of its round, before anything is sent."""
        self.tries = tries
        self.write()

    def open(self) -> None:
        """Note that seeds are opened for a sum that the pending update is in, before any is."""
        assert self.pending is not None
        self.opened = self.pending.round
        self.write()

    def accepted(self) -> None:
        """Go on from the new state."""
        assert self.pending is not None
        self.entry = self.pending.state
        self.rounds, self.alone = [*self.rounds, self.pending.round], list(self.pending.alone)
        self.pending = None
        self.write()

    def refused(self) -> None:
        """Go on from the old state."""
        self.pending = None
        self.write()

    def went_on(self, round_: int, entry: Entry) -> None:
        """Keep what a round without contact made; it is lost with a pending update that is not taken."""
        if self.pending is None:
            self.entry, self.alone = entry, [*self.alone, round_]
        else:
            self.pending = replace(self.pending, state=entry, alone=(*self.pending.alone, round_))
        self.write()

    def go_back(self, rounds: int) -> str:
        """Undo what was accepted after so many rounds, for the server has; return what was done, to be written."""
        if not self.rounds or self.rounds[-1] < rounds:
            return ""
        wanted, done = [round_ for round_ in self.rounds if round_ < rounds], "begins like a newcomer"
        self.entry, self.rounds, self.alone, self.pending = None, [], [], None
        for about, named in filter(None, map(_read, _files(self.directory) if wanted else ())):
            if about["rounds"] == wanted:
                self._become({**about, "pending": None}, named)
                done = f"goes on with its state after round {wanted[-1] + 1}"
                break
        return f"the server went back, and no update of this device after round {rounds} counts; {done}"

    def move(self, counted: int, *, had: bool, home: str) -> str:
        """Keep what its server had of it, which is out, and nothing else; return what was done, to be written.

        `home` is the run of the server that has it from now on.
        """
        pending, self.pending = self.pending, None
        if pending is not None and had and pending.round == counted - 1:
            self.entry, self.rounds, self.alone = pending.state, [*self.rounds, pending.round], list(pending.alone)
        done = self.go_back(counted).replace("the server went back", "its server is out")
        self.home = home
        return done or "its server is out; goes on with its state at another one"

    def finish(self) -> None:
        """Note that the final model is kept: the server is not needed any more."""
        self.finished = True
        self.write()

    @classmethod
    def left_alone(cls, directory: Path) -> list[int] | None:
        """Return the last rounds without contact of the device that a directory belongs to; None: it is not done."""
        found, _ = _newest(_files(directory))
        return found[0].get("alone", []) if found is not None and found[0]["finished"] else None

    @classmethod
    def home_of(cls, directory: Path) -> tuple[str, str] | None:
        """Return the run of the state that a directory has, and that of the server that has its device; None: none."""
        found, _ = _newest(_files(directory))
        if found is None:
            return None
        run = str(found[0]["run"])
        return run, str(found[0].get("home", run))

    def write(self) -> None:
        """Make it durable, and remove files that are not needed any more."""
        pending = self.pending
        named = {f"state/{path}": leaf for path, leaf in (self.entry or {}).items()}
        before, taken = _files(self.directory), len(self.rounds)
        number = before[0].number + 1 if before else 1
        about = {
            "file": number,
            "run": self.run,
            "number": self._number,
            "known": self.entry is not None,
            "rounds": self.rounds,
            "alone": self.alone,
            "finished": self.finished,
            "home": self.home,
            "opened": self.opened,
            "tries": self.tries.said(),
            "pending": None
            if pending is None
            else {"round": pending.round, "model": pending.model, "alone": pending.alone},
        }
        if pending is not None:
            named |= {f"next/{path}": leaf for path, leaf in pending.state.items()}
            named["update"] = torch.frombuffer(bytearray(pending.update), dtype=torch.uint8)
        data = sealed(safetensors.torch.save(named, {"format": _FORMAT, "about": json.dumps(about)}))
        atomic_write(self.directory / f"state-{number:06d}-{taken:06d}.safetensors", *data)
        with storage(self.directory):
            for file in {*before[1:], *self._damaged} - self._for_going_back(before, taken):
                file.path.unlink(missing_ok=True)
        self._damaged = []

    def _for_going_back(self, files: list[_Kept], taken: int) -> set[_Kept]:
        """Return, of files, the first with each state that a server may want back."""
        first = {file.taken: file for file in files if file not in self._damaged}  # the newest come first
        return {file for count, file in first.items() if taken - self._checkpoints < count <= taken}

    def _become(self, about: dict[str, Any], named: Entry) -> None:
        if (about["run"], about["number"]) != (self.run, self._number):
            raise BadInput(f"{self.directory}: has the state of another run or device; choose another --state")
        self.rounds, self.finished, self.pending = about["rounds"], about["finished"], None
        self.opened = max(self.opened, about.get("opened", -1))
        self.tries = max(self.tries, Tries.of(about.get("tries")), key=lambda tries: tries.reached)
        self.alone = about.get("alone", [])  # version 0.1 had none
        self.home = about.get("home", self.run)
        self.entry = _under(named, "state/") if about["known"] else None
        if about["pending"] is not None:
            said, update = about["pending"], named["update"].numpy().tobytes() if "update" in named else b""
            alone = tuple(said.get("alone", ()))
            self.pending = Pending(said["round"], said["model"], update, _under(named, "next/"), alone)


def _files(directory: Path) -> list[_Kept]:
    """Return the files of a device's state, the newest first; that of version 0.1 is the oldest."""
    found = [
        _Kept(int(path.stem.split("-")[1]), int(path.stem.split("-")[2]), path)
        for path in directory.glob("state-[0-9]*-[0-9]*.safetensors")
    ]
    old = directory / _OLD
    return sorted([*found, _Kept(0, 0, old)] if old.exists() else found, reverse=True)


def _newest(files: list[_Kept]) -> tuple[_Content | None, str]:
    """Return what the newest sound file of two has, and which was damaged; None: there are no files."""
    for place, file in enumerate(files[:2]):
        if (found := _read(file)) is not None:
            note = f"{files[0].path}: was damaged; goes on with what was kept before it, {file.path.name}"
            return found, note if place else ""
    if files:
        raise BadInput(
            f"{files[0].path}: was damaged or is not of personafl, and there is no sound one before it; put a copy "
            "back, or choose another --state, and the device begins like a newcomer"
        )
    return None, ""


def _read(file: _Kept) -> _Content | None:
    """Return what a state file says about itself, and its tensors; None if it was damaged."""
    try:
        data = file.path.read_bytes()
        kept = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        if kept["format"] != (_FORMAT if is_sealed(data) else _FIRST):
            return None
        about = json.loads(kept["about"])
        return (about, wire.decode_named(data)) if about.get("file", file.number) == file.number else None
    except (OSError, ValueError, KeyError, TypeError, BadInput):
        return None


def _under(named: Entry, prefix: str) -> Entry:
    return {name.removeprefix(prefix): leaf for name, leaf in named.items() if name.startswith(prefix)}
