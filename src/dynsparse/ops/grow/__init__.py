"""Positions to grow: the best or random ones outside a pattern, without an [out, in] matrix."""

from dynsparse.ops.grow.random import random_outside
from dynsparse.ops.grow.select import select
from dynsparse.ops.grow.topk import POOLINGS, GrowCandidates, topk_outside

__all__ = ["POOLINGS", "GrowCandidates", "random_outside", "select", "topk_outside"]
