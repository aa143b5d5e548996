"""Lets the tests here import `crash_driver`, which is also a script."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
