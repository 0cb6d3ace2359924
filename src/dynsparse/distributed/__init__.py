"""One model on many ranks: layers in rectangles, stages of a pipeline, checkpoints."""

from importlib import import_module
from typing import Any

from dynsparse.distributed.checkpoint import Saving, load_checkpoint, save_checkpoint
from dynsparse.distributed.replicate import replicate
from dynsparse.distributed.split import gather, split
from dynsparse.distributed.stages import stages

__all__ = [
    "Saving",
    "SplitCols",
    "SplitHeads",
    "SplitPair",
    "SplitRows",
    "gather",
    "load_checkpoint",
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
