"""Which blocks of a matrix are present, and how one such choice turns into the next.

Everything above this room talks in `SparsePattern` and `Rewiring`: layers hold a pattern, pattern
updates produce a rewiring, optimizer states and records follow by applying it.
"""

from dynsparse.pattern.coordinates import sample_without_replacement
from dynsparse.pattern.positions import PatternIndex
from dynsparse.pattern.rewiring import Rewiring
from dynsparse.pattern.sparse_pattern import SparsePattern

__all__ = ["PatternIndex", "Rewiring", "SparsePattern", "sample_without_replacement"]
