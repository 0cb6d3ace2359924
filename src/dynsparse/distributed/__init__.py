"""One model on many ranks: rectangles and plans for them, stages of a pipeline, checkpoints."""

from importlib import import_module
from typing import Any

from dynsparse.distributed.checkpoint import Saving, load_checkpoint, save_checkpoint
from dynsparse.distributed.cluster import Cluster, Link
from dynsparse.distributed.plan import Plan, make_plan
from dynsparse.distributed.probe import measure
from dynsparse.distributed.replicate import replicate
from dynsparse.distributed.split import gather, split
from dynsparse.distributed.stages import stages

__all__ = [
    "Cluster",
    "Link",
    "Plan",
    "Saving",
    "SplitCols",
    "SplitHeads",
    "SplitPair",
    "SplitRows",
    "gather",
    "load_checkpoint",
    "make_plan",
    "measure",
    "replicate",
    "save_checkpoint",
    "split",
    "stages",
]


def __getattr__(name: str) -> Any:
    # What they are made of loads half of torch, which the others do without.
    if name in ("SplitCols", "SplitHeads", "SplitPair", "SplitRows"):
        return getattr(import_module("dynsparse.distributed.styles"), name)
    raise AttributeError(f"module 'dynsparse.distributed' has no attribute {name!r}")
