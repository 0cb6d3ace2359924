"""Right calls of plans over ranks, of layers in rectangles and of stages."""

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


def cluster():
    return distributed.Cluster(distributed.Link(1e-5, 1e9))


def stored():
    path = folder() / "cluster.json"
    cluster().save(path)
    return path


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
    "dynsparse.distributed.Cluster": Recipe(
        distributed.Cluster,
        lambda: {
            "inner": distributed.Link(1e-5, 1e9), "outer": distributed.Link(1e-4, 1e8),
            "ranks_per_node": 8, "threads": 2, "slowness": 1.0, "flops": 1e12, "optimizer": 1e-9,
        },
    ),
    "dynsparse.distributed.Cluster.save": Recipe(
        cluster().save, lambda: {"path": folder() / "cluster.json"}, (OSError,)
    ),
    "dynsparse.distributed.Cluster.load": Recipe(
        distributed.Cluster.load, lambda: {"path": stored()}, (OSError,)
    ),
    "dynsparse.distributed.Cluster.from_dict": Recipe(
        distributed.Cluster.from_dict, lambda: {"state": cluster().to_dict()}
    ),
    "dynsparse.distributed.make_plan": Recipe(
        distributed.make_plan,
        lambda: {
            "model": row(), "mesh": 4, "batch": 8, "chains": [["0", "2"]], "cluster": cluster(),
            "memory": 1e9, "states": 2,
        },
    ),
    "dynsparse.distributed.measure": Recipe(distributed.measure, lambda: {"group": None}),
    "dynsparse.distributed.SplitPair": Recipe(
        distributed.SplitPair, lambda: {"first": "0", "second": "2"}
    ),
    "dynsparse.distributed.gather": Recipe(distributed.gather, lambda: {"model": row()}),
    "dynsparse.distributed.split": Recipe(
        distributed.split,
        lambda: {
            "model": row(), "mesh": RankGrid(), "plan": distributed.make_plan(row(), 1, batch=8)
        },
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
        distributed.stages, lambda: {"model": row(), "n": 2, "batch": 8, "cluster": cluster()}
    ),
}  # fmt: skip
