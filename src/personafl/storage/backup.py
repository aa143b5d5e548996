"""A copy of a server's or a coordinator's run directory, which may be at work meanwhile: what a kill would have left.

The directory goes on from wherever a kill leaves it, so such a moment is enough. Files are only removed after the next
checkpoint: what is copied while the checkpoint stays the same belongs together. The journal is read first, so all that
it speaks of is there; what is added to it meanwhile is left out. If there was a new checkpoint, it is copied anew.
"""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from personafl.errors import BadInput, Failed
from personafl.storage.audit import Audit, verify
from personafl.storage.files import atomic_write, storage, sync
from personafl.storage.journal import Journal
from personafl.storage.rundir import RunDirectory

_TRIES, _PAUSE = 200, 0.05
_LEFT_OUT = ("lock", "journal.jsonl")


def back_up(directory: Path, target: Path) -> Audit:
    """Copy a run directory to a new one, and return what its journal comes to."""
    if not (directory / "journal.jsonl").is_file():
        raise BadInput(f"{directory}: is not the run directory of a server or coordinator; it has no journal.jsonl")
    if target.exists():
        raise BadInput(f"{target}: exists already; choose another one for the copy")
    with storage(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))  # its owner's alone
    try:
        for _ in range(_TRIES):
            if _copied(directory, temporary):
                found = verify(temporary)
                with storage(target):
                    temporary.rename(target)
                    sync(target.parent)
                return found
            time.sleep(_PAUSE)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    raise Failed(f"{directory}: rounds end sooner than it can be copied; try again, or stop the server meanwhile")


def _copied(directory: Path, target: Path) -> bool:
    """Copy what belongs together; return whether it does."""
    shutil.rmtree(target)
    with storage(target):
        target.mkdir(mode=0o700)
    before = _checkpoint(directory)
    data = (directory / "journal.jsonl").read_bytes()
    try:
        for path in sorted(directory.rglob("*")):
            name = path.relative_to(directory)
            if path.is_dir():
                with storage(target):
                    (target / name).mkdir(mode=0o700)
            elif name.as_posix() not in _LEFT_OUT and path.suffix != ".partial":
                atomic_write(target / name, path.read_bytes())
    except FileNotFoundError:
        return False
    atomic_write(target / "journal.jsonl", data[: data.rfind(b"\n") + 1])
    return _checkpoint(directory) == before == _checkpoint(target) and _is_whole(target)


def _checkpoint(directory: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return (directory / "checkpoint.json").read_bytes()
    return b""


def _is_whole(directory: Path) -> bool:
    """Say whether what was sent by others is what the journal says: one may have sent something else meanwhile."""
    digests: dict[str, str] = {}
    pieces: list[dict[str, Any]] = []  # of the open round's file
    for entry in Journal(directory / "journal.jsonl").entries:
        if entry["event"] == "opened":
            pieces = []
        if "begin" in entry:
            pieces.append(entry)
        elif entry["event"] in ("accepted", "ready"):
            sender = entry["number"] if "number" in entry else entry["server"]
            digests[f"{entry['round']:06d}-{sender:06d}.safetensors"] = entry["digest"]
    sent = [path for folder in ("updates", "announced") for path in sorted((directory / folder).glob("*.safetensors"))]
    if _checkpoint(directory):
        RunDirectory(directory).server_bytes(RunDirectory(directory).checkpoint())
    for path in sent:
        if path.name not in digests:
            path.unlink()  # it came after the line that would speak of it was looked for
        elif sha256(path.read_bytes()).hexdigest() != digests[path.name]:
            return False
    return all(_is_there(directory / "updates" / f"{piece['round']:06d}.updates", piece) for piece in pieces)


def _is_there(path: Path, piece: Mapping[str, Any]) -> bool:
    """Say whether a file has a piece as the journal has it; there is none any more where the round is closed."""
    if not path.exists():
        return True
    with path.open("rb") as file:
        file.seek(piece["begin"])
        found = sha256(file.read(piece["size"])).hexdigest()
    return found == str(piece["digest"])
