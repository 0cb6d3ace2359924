"""Positions to grow: the best or random ones outside a pattern, without an [out, in] matrix."""

from dynsparse.ops.grow.free_positions import random_outside
from dynsparse.ops.grow.selection import select
from dynsparse.ops.grow.topk import (
    POOLINGS,
    GrowCandidates,
    best_free,
    check_pooling,
    topk_outside,
)

__all__ = [
    "POOLINGS",
    "GrowCandidates",
    "best_free",
    "check_pooling",
    "random_outside",
    "select",
    "topk_outside",
]
