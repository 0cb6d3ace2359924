"""The tests here import what they share from this folder, and so do the processes they start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
