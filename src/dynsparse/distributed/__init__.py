"""One model on many ranks: replicas, tensor-parallel shards, stages of a pipeline."""

from importlib import import_module
from typing import Any

from dynsparse.distributed.distribute import clip_grad_norm_, gather, replicate, split, stages

__all__ = [
    "SplitCols",
    "SplitHeads",
    "SplitPair",
    "SplitRows",
    "clip_grad_norm_",
    "gather",
    "replicate",
    "split",
    "stages",
]


def __getattr__(name: str) -> Any:
    # Their base class imports half of torch, which the functions above do without.
    if name in ("SplitCols", "SplitHeads", "SplitPair", "SplitRows"):
        return getattr(import_module("dynsparse.distributed.styles"), name)
    raise AttributeError(f"module 'dynsparse.distributed' has no attribute {name!r}")
