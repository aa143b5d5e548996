"""Helpers of these tests are modules beside them and beside those of the built-in transport."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "deploy")]
