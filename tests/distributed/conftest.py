"""The tests here import what they share from this folder and from that of the ranks, and so do the
processes they start."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "ranks")]
