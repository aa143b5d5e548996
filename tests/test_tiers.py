"""What is left to the second tier by its time is there."""

from pathlib import Path

from tiers import long_tests

ROOT = Path(__file__).resolve().parents[1]


def test_long_tests_are_tests() -> None:
    """Renamed ones would come back to the first tier unseen; python tests/tiers.py writes the list anew."""
    texts: dict[str, str] = {}
    for test in long_tests():
        file, _, names = test.partition("::")
        if file not in texts:
            assert (ROOT / file).exists(), test
            texts[file] = (ROOT / file).read_text()
        first = names.partition("[")[0].partition("::")[0]
        assert f"def {first}(" in texts[file] or f"{first} = " in texts[file] or f"class {first}" in texts[file], test
