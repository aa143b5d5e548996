"""SIGKILL of real processes at random times and at writes: the same final model, and no state lost. More: `slow`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DRIVER = Path(__file__).with_name("processes.py")


def driven(*words: str) -> list[dict[str, Any]]:
    """Run the driver in a process of its own: it forks, which a process that has used gRPC must not."""
    done = subprocess.run([sys.executable, str(DRIVER), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.system
def test_killed_processes_come_to_the_same_model() -> None:
    results = driven("kills", "2")
    assert len(results) == 2
    assert all(result["equal"] for result in results)
    assert sum(result["kills"] for result in results) > 0


@pytest.mark.system
def test_some_failpoints() -> None:
    results = driven("failpoints", "80")
    assert all(result["equal"] for result in results if "equal" in result)
    assert sum(result.get("failpoints", 0) for result in results) >= 2


@pytest.mark.system
def test_some_writes_to_a_full_disk() -> None:
    results = driven("full", "25")
    assert all(result["equal"] and not result["tracebacks"] for result in results if "equal" in result)
    assert sum(result.get("full", 0) for result in results) >= 4


@pytest.mark.slow
def test_every_write_to_a_full_disk() -> None:
    results = [result for result in driven("full") if "equal" in result]
    assert [result for result in results if not result["equal"] or result["tracebacks"]] == []


@pytest.mark.slow
def test_every_method_is_the_simulator_with_eight_devices() -> None:
    results = driven("equal")
    assert len(results) >= 28
    assert [result["method"] for result in results if not result["equal"]] == []


@pytest.mark.slow
def test_a_hundred_and_twenty_seeded_runs_with_kills() -> None:
    assert [result for result in driven("kills", "120") if not result["equal"]] == []


@pytest.mark.slow
def test_every_failpoint() -> None:
    assert [result for result in driven("failpoints") if not result.get("equal", True)] == []


@pytest.mark.slow
def test_ten_thousand_malformed_updates() -> None:
    (result,) = driven("malformed", "10000")
    assert result["sent"] >= 9_900
    assert result["accepted"] == 0
    assert result["model_unchanged"]


@pytest.mark.slow
def test_no_method_leaves_data_or_personal_parameters_in_a_servers_memory() -> None:
    for result in driven("canary"):
        assert not any(result["hits"].values()), result


@pytest.mark.system
def test_no_single_update_is_in_the_memory_of_a_server_that_has_sums() -> None:
    """But it is in that of one that takes updates singly: the search finds them."""
    summed, plain, noisy = driven("unseen")
    assert summed["secure"]
    assert not plain["secure"]
    assert summed["canaries"] >= 8
    assert not any(summed["hits"].values()), summed
    assert plain["hits"]["updates in memory"] > 0
    assert not any(noisy["hits"].values()), noisy


@pytest.mark.slow
def test_sums_survive_a_kill_at_every_write() -> None:
    results = driven("sums")
    assert all(result["equal"] for result in results if "equal" in result)
    assert {result["victim"] for result in results if result.get("failpoints")} == {"server", "device-0"}


@pytest.mark.system
def test_sums_survive_a_kill_at_some_writes() -> None:
    results = driven("sums", "7")
    assert all(result["equal"] for result in results if "equal" in result)
    assert sum(result.get("failpoints", 0) for result in results) > 2


@pytest.mark.parametrize(
    "every", [pytest.param("1", marks=pytest.mark.slow), pytest.param("9", marks=pytest.mark.system)]
)
def test_so_do_sums_with_noise_of_devices(every: str) -> None:
    """No noise is drawn twice: the bits are those of a run in which nobody was killed."""
    results = driven("shares", every)
    assert all(result["equal"] for result in results if "equal" in result)
    assert sum(result.get("failpoints", 0) for result in results) > 2


@pytest.mark.parametrize(
    "every", [pytest.param("1", marks=pytest.mark.slow), pytest.param("9", marks=pytest.mark.system)]
)
def test_so_do_protected_samples(every: str) -> None:
    """A device that is killed draws the same noise for the same training, whatever it had written of it."""
    pytest.importorskip("dp_accounting", reason="differential privacy is accounted for by dp-accounting")
    results = driven("samples", every)
    assert all(result["equal"] for result in results if "equal" in result)
    assert sum(result.get("failpoints", 0) for result in results) > 2


@pytest.mark.slow
def test_dropouts_cost_little_and_no_round_is_lost() -> None:
    whole, *others = driven("dropouts")
    for result in others:
        assert result["rounds_closed"] == result["of"]
        assert result["accuracy_global"] > whole["accuracy_global"] - 0.015


@pytest.mark.slow
def test_two_hundred_devices() -> None:
    (result,) = driven("load", "200")
    assert result["updates"] == 200 * result["rounds"]
    assert result["tracebacks"] == result["refused"] == 0
