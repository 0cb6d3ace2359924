"""The targets are modules of their own, found from the tests as from `run.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
