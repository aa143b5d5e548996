from pathlib import Path

import pytest

from least_squares import LeastSquares, least_squares


@pytest.fixture
def problem(tmp_path: Path) -> LeastSquares:
    return least_squares(tmp_path)
