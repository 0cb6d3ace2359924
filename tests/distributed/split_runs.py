"""Functions of the tensor-parallel tests that run in every process of a group."""

from __future__ import annotations

import copy

import torch
from sharded_models import shard
from slot_order import row_major
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dynsparse as ds
from dynsparse.distributed import clip_grad_norm_, gather, replicate, split
from dynsparse.training import ConstantSchedule


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        options = {"density": 0.4, "dtype": torch.float64}
        self.attention = ds.nn.SparseMultiheadAttention(24, 3, batch_first=True, **options)
        self.up = ds.nn.SparseLinear(24, 64, **options)
        self.down = ds.nn.SparseLinear(64, 24, **options)
        self.wide = ds.nn.SparseLinear(24, 40, **options)
        self.last = ds.nn.SparseLinear(40, 8, **options)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.down(self.up(x).relu())
        return self.last(self.wide(x).relu())


def styles():
    return {
        "attention": ds.distributed.SplitHeads(),
        "": ds.distributed.SplitPair("up", "down"),
        "wide": ds.distributed.SplitRows(),
        "last": ds.distributed.SplitCols(),
    }


def make_model_and_input():
    torch.manual_seed(0)
    return Block(), torch.randn(4, 5, 24).double()


def check_gradients(own, whole, atol=1e-12):
    """Compare gradients of a split model, which replace its parameters, with the full one's."""
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.copy_(parameter.grad)
    for key, tensor in gather(own).items():
        if not key.endswith(("rows", "cols")):
            expected = whole.get_parameter(key).grad
            torch.testing.assert_close(tensor, expected, rtol=0, atol=atol)


def check_parallelize_module(rank, size):
    from torch.distributed.tensor.parallel import parallelize_module

    model, x = make_model_and_input()
    y = model(x)
    y.square().sum().backward()
    own = copy.deepcopy(model)
    own.zero_grad()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    parallelize_module(own, mesh, styles())
    got = own(x)
    torch.testing.assert_close(got, y, rtol=0, atol=1e-12)
    got.square().sum().backward()
    assert all(torch.equal(t, model.state_dict()[key]) for key, t in gather(own).items())
    held = sum(p.numel() for p in own.parameters())
    check_gradients(own, model)
    return held


EVERY = {"schedule": ConstantSchedule(total_steps=100, update_interval=1, drop_fraction=0.2)}
KINDS = {
    "rigl": (ds.RigL, EVERY),
    "set": (ds.SET, EVERY | {"seed": 3}),
    # Replaces one position of the first layer: often in one shard only.
    "set-few": (ds.SET, {"schedule": ConstantSchedule(100, 1, 0.003), "seed": 3}),
    "topkast": (ds.training.TopKAST, EVERY | {"seed": 3}),
    "deepr": (ds.training.DeepR, {"total_steps": 100, "l1": 0.05, "temperature": 1e-6, "seed": 3}),
    "gmp": (ds.training.GMP, {"total_steps": 10, "final_density": 0.1, "update_interval": 1}),
}


def train_and_compare(rank, size, algorithms, shards=False):
    """Compare trainings with layers sharded over x and samples over z with one process.

    Args:
        shards: shard the values over z instead of replicating them.

    Returns:
        Number of updates of each algorithm.
    """
    return [train_one_algorithm(size, one, shards) for one in algorithms]


def train_one_algorithm(size, algorithm, shards):
    torch.manual_seed(0)
    options = {"density": 0.3, "dtype": torch.float64}
    whole = nn.Sequential(
        ds.nn.SparseLinear(24, 48, **options), nn.Tanh(), ds.nn.SparseLinear(48, 16, **options)
    )
    model = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("z", "x"))
    z = mesh["z"].get_local_rank()
    split(model, mesh)
    data = shard(model, mesh["z"]) if shards else replicate(model, ranks=mesh["z"])
    trainers = []
    kind, more = KINDS[algorithm]
    for one, ranks in ((whole, None), (model, mesh)):
        optimizer = torch.optim.Adam(one.parameters(), lr=0.01)
        trainers.append(kind(one, optimizer, ranks=ranks, **more))
    for _ in range(8):
        x, y = torch.randn(8, 24).double(), torch.randn(8, 16).double()
        step((whole, data), trainers, (x, y), size // 2, z)
        found = row_major(gather(model))
        for key, tensor in row_major(whole.state_dict()).items():
            if key.endswith(("rows", "cols")):
                assert torch.equal(found[key], tensor), key
            else:
                torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-10)
    assert trainers[0].updates == trainers[1].updates
    return trainers[1].updates


def step(models, trainers, batch, replicas, z):
    """Step the whole model with the batch, and this rank's shard with its part of the batch."""
    mine = [t.chunk(replicas)[z] for t in batch]
    for forward, trainer, (x, y) in zip(models, trainers, (batch, mine), strict=True):
        trainer.optimizer.zero_grad()
        nn.functional.mse_loss(forward(x), y).backward()
        clip_grad_norm_(forward, 0.1)
        trainer.step()
