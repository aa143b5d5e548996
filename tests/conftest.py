"""Settings for all tests."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tiers import long_tests

# Tests run in parallel processes; threads inside each would only fight for the cores.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("default", deadline=None, max_examples=30)
settings.load_profile("default")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to `make test-system` what takes long."""
    long = long_tests()
    for item in items:
        if item.nodeid in long:
            item.add_marker(pytest.mark.system)


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engine.workers = "auto" mean this process: tests start workers only where they say so."""
    monkeypatch.setattr("personafl.simulate.workers.local.cores", lambda: 1)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what runs measure out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def shared_data() -> Path:
    """The folder with real data sets beside the project; tests that need it are skipped where it is not."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the real data sets are not beside this checkout (../shared/data)")
    return SHARED_DATA


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Call the command line in this process; return its exit code, standard output and standard error."""
    from personafl import cli

    monkeypatch.setattr(sys, "path", [*sys.path])

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["personafl", *words])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return call
