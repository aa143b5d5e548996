"""Looks whether a journal is as it was written, and as far as the last checkpoint says that it was."""

from dataclasses import dataclass
from pathlib import Path

from personafl.errors import BadInput, Failed
from personafl.storage.chain import Chain, Link, faults
from personafl.storage.files import storage
from personafl.storage.rundir import Checkpoint, RunDirectory

_MOST = 20  # faults that are told of


@dataclass(frozen=True)
class Audit:
    """What a journal that is as it was written comes to."""

    lines: int
    head: str  # the hash of them all
    rounds: int  # of the last checkpoint, which has the same


def verify(directory: Path, head: str | None = None) -> Audit:
    """Return what a run's journal comes to; fail if a line of it was changed, removed, repeated or moved.

    `head` is one that was noted before: if no line of the journal has it, they were all made anew since.
    """
    path = directory / "journal.jsonl"
    if not path.is_file():
        raise BadInput(f"{path}: is not there; give the run directory of a server or coordinator")
    checkpoint = RunDirectory(directory).checkpoint()  # before the journal, which may be added to meanwhile
    with storage(path):
        data = path.read_bytes()
    lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)  # half a line is not written yet
    found = list(dict.fromkeys([*faults(lines), *_cut_off(lines, checkpoint)]))
    if found:
        more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
        raise Failed(f"{path}: is not as it was written: {'; '.join(found[:_MOST])}{more}")
    chain, heads = Chain(), set[str]()
    for line in lines:
        chain.add(line)
        heads.add(chain.head)
    if head is not None and head not in heads:
        raise Failed(f"{path}: no line has the head {head}, so lines were made anew or cut off since it was noted")
    return Audit(chain.lines, chain.head, checkpoint.rounds)


def _cut_off(lines: list[bytes], checkpoint: Checkpoint) -> list[str]:
    """Say if the last line that there was at a checkpoint is not there any more."""
    if not checkpoint.journal_head or any(_head(line) == checkpoint.journal_head for line in reversed(lines)):
        return []
    knows = f"the last that the checkpoint of round {checkpoint.rounds} knows is none of its {len(lines)} lines"
    return [f"its end was cut off or changed: {knows}"]


def _head(line: bytes) -> str:
    try:
        return Link.of(line).after
    except ValueError:
        return ""
