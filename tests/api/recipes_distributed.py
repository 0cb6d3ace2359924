"""Valid calls of tensor-parallel layers and of pipeline stages."""

from __future__ import annotations

import torch
from recipes import Recipe
from torch import nn

import dynsparse as ds
from dynsparse import distributed
from dynsparse.ranks import RankGrid


def row():
    return nn.Sequential(ds.nn.SparseLinear(8, 8), nn.ReLU(), ds.nn.SparseLinear(8, 8))


def replicated(**arguments):
    """Call `replicate` in a process group of one rank."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return distributed.replicate(**arguments)
    finally:
        torch.distributed.destroy_process_group()


RECIPES = {
    "dynsparse.distributed.SplitPair": Recipe(
        distributed.SplitPair, lambda: {"first": "0", "second": "2"}
    ),
    "dynsparse.distributed.clip_grad_norm_": Recipe(
        distributed.clip_grad_norm_, lambda: {"model": row(), "max_norm": 1.0}
    ),
    "dynsparse.distributed.gather": Recipe(distributed.gather, lambda: {"model": row()}),
    "dynsparse.distributed.split": Recipe(
        distributed.split, lambda: {"model": row(), "mesh": RankGrid()}
    ),
    "dynsparse.distributed.replicate": Recipe(
        replicated, lambda: {"model": row(), "ranks": "auto"}
    ),
    "dynsparse.distributed.stages": Recipe(
        distributed.stages, lambda: {"model": row(), "n": 2}
    ),
}  # fmt: skip
