"""Which systems personafl can run on."""

import sys

from personafl.errors import BadInput


def check_system() -> None:
    """Refuse, by one line, a system that lacks what runs are locked, forked and stopped by."""
    if sys.platform == "win32":
        raise BadInput("Windows is not supported; install and run personafl in WSL, the Windows Subsystem for Linux")
