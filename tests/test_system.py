"""What a process is told of its own memory, and what it gives back."""

import platform
import subprocess
import sys

import pytest
import torch

MEASURED = "from personafl.system import peak_memory; print(peak_memory())"


def test_the_memory_of_a_process_is_not_that_of_whoever_started_it() -> None:
    large = torch.zeros(100_000_000)  # 400 MB, so that this process has more than a bare interpreter
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True)
    assert large.numel() * large.element_size() / 2**20 > float(done.stdout) > 1


FREED = """
from pathlib import Path
from personafl.system import give_memory_back
def taken():
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) / 2**10
blocks = [bytes(50_000) for _ in range(2000)]
kept = blocks[::100]
del blocks
before = taken()
give_memory_back()
print(before - taken())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another library gives back what it likes")
def test_what_is_free_between_what_is_used_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 50  # of 95 MB that are free
