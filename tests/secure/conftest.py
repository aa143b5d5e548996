"""Helpers of these tests are modules beside them; tests are imported by path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
