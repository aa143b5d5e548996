"""What a process is told of its own memory."""

import subprocess
import sys

import torch

MEASURED = "from personafl.system import peak_memory; print(peak_memory())"


def test_the_memory_of_a_process_is_not_that_of_whoever_started_it() -> None:
    large = torch.zeros(100_000_000)  # 400 MB, so that this process has more than a bare interpreter
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True)
    assert large.numel() * large.element_size() / 2**20 > float(done.stdout) > 1
