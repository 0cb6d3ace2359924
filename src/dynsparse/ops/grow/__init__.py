"""Positions to grow: the best or random ones outside a pattern, without an [out, in] matrix."""

from dynsparse.ops.grow.given_scores import best_free
from dynsparse.ops.grow.random import random_outside
from dynsparse.ops.grow.selection import select
from dynsparse.ops.grow.topk import POOLINGS, GrowCandidates, check_pooling, topk_outside

__all__ = [
    "POOLINGS",
    "GrowCandidates",
    "best_free",
    "check_pooling",
    "random_outside",
    "select",
    "topk_outside",
]
