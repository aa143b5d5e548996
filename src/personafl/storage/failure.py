"""Why a run has no result, as its directory keeps it: failure.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from personafl.errors import BadInput, Diverged, Failed
from personafl.storage.files import read_json, write_json
from personafl.storage.rundir import RunDirectory, resume_command

FAILURE_FILE = "failure.json"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a run failed and when. One that diverged would do so again; what else failed may be mended and continued."""

    diverged: bool
    when: str  # as in "round 7", "after round 50"; empty: before anything was trained
    reason: str
    traceback: str = ""

    @property
    def words(self) -> str:
        """What happened, in a line."""
        when = self.when if not self.when or self.when.startswith("after") else f"in {self.when}"
        return f"{' '.join(filter(None, ('diverged' if self.diverged else 'failed', when)))}: {self.reason}"

    def keep(self, run: Path) -> None:
        """Write it into a run's directory."""
        write_json(run / FAILURE_FILE, vars(self))

    @classmethod
    def of(cls, run: Path) -> Failure | None:
        """Return why a run failed, if it did."""
        path = run / FAILURE_FILE
        if not path.exists():
            return None
        try:
            return cls(**read_json(path))
        except TypeError as error:
            raise BadInput(f"{path}: was changed or damaged; remove it, and the run is tried again") from error

    def error(self, run: Path) -> Failed:
        """Return it as an error that says what is left of the run, and what to do."""
        told = f"{self.when}: {self.reason}" if self.when else self.reason
        if self.diverged:
            kept = f"the checkpoint after round {RunDirectory(run).checkpoint().rounds} is kept in {run}"
            return Diverged(f"{told}; {kept}; begin anew with other values: {resume_command(run)} KEY=VALUE")
        where = f"; the traceback is in {run / FAILURE_FILE}" if self.traceback else ""
        return Failed(f"{told}{where}; continue with: {resume_command(run)}")
