"""Windows, which is not supported: one line says so, in a command as in Python."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

import personafl
from personafl import BadInput

# What Windows lacks cannot be imported either.
PRETEND = """
import sys, types
sys.modules |= dict.fromkeys(("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"))
import personafl.system
personafl.system.sys = types.SimpleNamespace(platform="win32")
from personafl.cli import main
main()
"""


@pytest.mark.parametrize("words", [["--help"], ["run", "--method", "fedavg"]], ids=" ".join)
def test_a_command_says_so_in_one_line(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PRETEND, *words], capture_output=True, text=True)
    assert done.returncode == BadInput.exit_code
    assert done.stdout == ""
    assert done.stderr.startswith("error: Windows is not supported; install and run personafl in WSL")
    assert done.stderr.count("\n") == 1


def test_python_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("personafl.system.sys", SimpleNamespace(platform="win32"))
    with pytest.raises(BadInput, match="Windows is not supported"):
        _ = personafl.run
    assert personafl.BadInput is BadInput  # so that it can be caught
