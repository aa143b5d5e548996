"""The rules and the attacks are byzfl's, where that is installed."""

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "byzfl_check.py"


def check() -> Any:
    spec = importlib.util.spec_from_file_location("byzfl_check", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rules_and_attacks_are_those_of_byzfl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PATH.parent)
    module = check()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as it is imported
        byzfl = module.imported()
    if byzfl is None:
        pytest.skip("byzfl is not installed: pip install --no-deps --target /tmp/byzfl byzfl; PYTHONPATH=/tmp/byzfl")
    found = module.differences(byzfl, 1)
    assert len(found) == 22
    assert {name: most for name, most in found.items() if most > module.LIMIT} == {}
