"""The command line, called in this process."""

import sys
from collections.abc import Callable

import pytest

from personafl import cli


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Call the command line; return its exit code, standard output and standard error."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["personafl", *words])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return call
