"""Every model learns with every part of it personal, one by one and stacked: the same numbers.

In a process of its own for each model, so that one that crashes, as torch's kernels may, is a failed test.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from models.cases import CASES
from models.trained import PARTS, RULES, learn
from tiers import tiered

# A server that imports once what every process needs. Forked here, one would have the threads of tests before: of gRPC,
# whose objects end a process when they are collected in another one.
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["personafl.testing", "personafl.models", "personafl.runs.scoring", "sklearn.datasets"])


@pytest.mark.parametrize("name", tiered(CASES, ["mlp", "cnn"]))
def test_every_part_learns(name: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    process = FORKING.Process(target=learn, args=(name, said))
    process.start()
    process.join()
    assert process.exitcode == 0, f"ended with {process.exitcode} at:\n{said.read_text()}"
    assert said.read_text().split("\n") == [f"{part} {method}" for part in PARTS[name] for method in RULES] + [""]
