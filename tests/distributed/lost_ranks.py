"""Trainings that lose a rank; each function runs in every process of a group."""

from __future__ import annotations

import os
import signal

import torch
from pipelines import EVERY, batch, make_pieces, make_step
from rank_trainings import SCHEDULE, backward, model_of, optimizer_of
from sharded_training import shard
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import dynsparse as ds
from dynsparse.distributed import split


def replicas(net, size):
    return DistributedDataParallel(net)


def shards(net, size):
    return shard(net, size=size)


def rectangles(net, size):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    return split(net, mesh)


WAYS = {"replicas": replicas, "shards": shards, "rectangles": rectangles}


def train_until_rank_is_lost(rank, size, way, kind):
    """Train and lose the last rank in step 3, which ends in an update."""
    net = model_of()
    forward = WAYS[way](net, size)
    optimizer = optimizer_of(net)
    trainer = ds.RigL(net, optimizer, schedule=SCHEDULE)
    trainer.ranks.timeout = 6.0
    store = torch.distributed.distributed_c10d._get_default_store()
    shares = (0, 1) if way == "rectangles" else (rank, size)
    for step in range(1, 8):
        here = step == 3 and rank == size - 1
        if here and kind in GOES:
            GOES[kind]()
            break
        if not (here and kind == "no backward"):
            backward(forward, optimizer, step, *shares)
        if here and kind == "sleeps":
            store.wait(["others have raised"])
        if not (here and kind == "no step"):
            try:
                trainer.step()
            except RuntimeError:
                store.set("others have raised", "yes")
                raise
    torch.distributed.barrier()


def skip_a_step_in_a_pipeline(rank, size):
    """Train two pipeline stages with two replicas; the last rank skips the step of the first
    update."""
    replicas = 2
    mesh = init_device_mesh(
        "cpu", (replicas, size // replicas), mesh_dim_names=("replica", "stage")
    )
    stages, own = mesh["stage"].get_group(), mesh["replica"].get_group()
    at, deep = mesh["stage"].get_local_rank(), size // replicas
    piece = make_pieces("GPipe", at, deep)[at]
    forward = DistributedDataParallel(piece, process_group=own, find_unused_parameters=True)
    passes = make_step("GPipe", {at: forward}, deep, stages)
    optimizer = optimizer_of(piece)
    trainer = ds.RigL(piece, optimizer, schedule=EVERY, ranks=own)
    for step in range(1, 5):
        optimizer.zero_grad()
        if step == 2:
            trainer.ranks.timeout = 6.0
        passes(*batch(step, mesh["replica"].get_local_rank(), replicas))
        if step != 2 or rank != size - 1:
            trainer.step()


def _raise():
    raise OSError("the disk is gone")


GOES = {
    "raises": _raise,
    "exits at once": lambda: os._exit(4),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
