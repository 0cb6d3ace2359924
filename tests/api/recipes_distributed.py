"""Right calls of layers in rectangles and of stages."""

from __future__ import annotations

import torch
from recipes import Recipe
from recipes_parts import folder
from recipes_training import optimizer_of
from torch import nn

import dynsparse as ds
from dynsparse import distributed
from dynsparse.ranks import RankGrid


def row():
    return nn.Sequential(ds.nn.SparseLinear(8, 8), nn.ReLU(), ds.nn.SparseLinear(8, 8))


def saved():
    path, net = folder() / "ranks", row()
    distributed.save_checkpoint(path, model=net, optimizer=optimizer_of(net))
    return path


def replicated(**arguments):
    """`replicate` in a group of one."""
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
    "dynsparse.distributed.gather": Recipe(distributed.gather, lambda: {"model": row()}),
    "dynsparse.distributed.split": Recipe(
        distributed.split, lambda: {"model": row(), "mesh": RankGrid()}
    ),
    "dynsparse.distributed.save_checkpoint": Recipe(
        distributed.save_checkpoint,
        lambda: {
            "path": folder() / "ranks", "model": (net := row()), "optimizer": optimizer_of(net),
            "ranks": None, "wait": True,
        },
        (OSError,),
    ),
    "dynsparse.distributed.load_checkpoint": Recipe(
        distributed.load_checkpoint,
        lambda: {"path": saved(), "model": (net := row()), "optimizer": optimizer_of(net)},
        (OSError,),
    ),
    "dynsparse.distributed.replicate": Recipe(
        replicated, lambda: {"model": row(), "ranks": "auto"}
    ),
    "dynsparse.distributed.stages": Recipe(
        distributed.stages, lambda: {"model": row(), "n": 2}
    ),
}  # fmt: skip
