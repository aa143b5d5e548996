"""What the system is: which ones personafl can run on, and how much memory a process takes of it."""

import ctypes
import sys
from pathlib import Path

from personafl.errors import BadInput


def check_system() -> None:
    """Refuse, by one line, a system that lacks what runs are locked, forked and stopped by."""
    if sys.platform == "win32":
        raise BadInput("Windows is not supported; install and run personafl in WSL, the Windows Subsystem for Linux")


def peak_memory() -> float:
    """Peak resident memory of this process, in MiB.

    On Linux from the process itself: `ru_maxrss` begins with the memory of whoever started it.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**10
    import resource  # which Windows lacks, and Windows is to get the line above

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS counts in bytes


def give_memory_back() -> None:
    """Let the system have what is free in this process: glibc keeps pages between others that are in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not on macOS, nor with musl
    if trim is not None:
        trim(0)
