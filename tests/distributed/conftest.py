"""Puts this folder and tests/ranks on the import path, also of the processes that tests start."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "ranks")]
