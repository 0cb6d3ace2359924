"""Which blocks of a matrix are present, and how updates change them.

Layers hold a `SparsePattern`. A pattern update makes a `Rewiring`, which is applied to values,
optimizer states and records.
"""

from dynsparse.pattern.coordinates import sample_without_replacement
from dynsparse.pattern.rewiring import Rewiring
from dynsparse.pattern.sparse_pattern import PatternIndex, SparsePattern

__all__ = ["PatternIndex", "Rewiring", "SparsePattern", "sample_without_replacement"]
