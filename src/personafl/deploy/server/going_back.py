"""Going back to the end of an earlier round: the server's state, and with it the rounds since.

The journal keeps all lines and gets one more, which is what counts: a server that finds it last, and the checkpoint of
a later round, goes back before anything else. Devices learn from their next task that updates of theirs do not count
any more, and go back too (`device.state`).
"""

import os
from pathlib import Path

from personafl.deploy.server.opening import deployable, open_directory
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.runs.start import START_FILE
from personafl.storage.files import storage
from personafl.storage.journal import Journaled
from personafl.storage.rundir import Checkpoint


def roll_back(recipe: Recipe, path: Path, rounds: int) -> None:
    """Take a server's run back to the end of a round; 0: to before the first. It is not served meanwhile."""
    deployable(recipe)
    if recipe.secure is not None:
        raise BadInput("--roll-back: devices are in one sum of a round and in no other; with [secure] begin a new run")
    if not path.exists():
        raise BadInput(f"--roll-back: {path} does not exist; say which run with --out")
    with Journaled(open_directory(recipe, path)) as run:
        last = run.checkpoint()
        if rounds == last.rounds:
            raise BadInput(f"--roll-back {rounds}: {path} is at the end of this round already")
        run.directory.server_bytes(_kept(last, rounds, path))
        with storage(path):
            (path / START_FILE).unlink(missing_ok=True)  # of a run that was finished
        run.journal.write("rolled_back", round=rounds, before=last.rounds, by=f"user {os.getuid()}")
        _go_back(run, rounds)


def complete_roll_back(run: Journaled) -> None:
    """Go back if the last that a journal says is that the run went back."""
    said = run.journal.entries[-1] if run.journal.entries else {}
    if said.get("event") == "rolled_back" and run.directory.checkpoint().rounds != said["round"]:
        _go_back(run, said["round"])


def _go_back(run: Journaled, rounds: int) -> None:
    run.go_back(_kept(run.directory.checkpoint(), rounds, run.directory.path))


def _kept(last: Checkpoint, rounds: int, path: Path) -> Checkpoint:
    for checkpoint in last.before:
        if checkpoint.rounds == rounds:
            return checkpoint
    kept = ", ".join(str(one.rounds) for one in last.before) or "none"
    raise BadInput(
        f"--roll-back {rounds}: {path} has no state from then; it can go back to {kept} (deploy.checkpoints)"
    )
