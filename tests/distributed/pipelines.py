"""Pipeline stages trained on several ranks, compared with the whole model in one process."""

from __future__ import annotations

from itertools import pairwise

import torch
from rank_trainings import apart, layers_of, weights
from sharded_training import shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import dynsparse as ds
from dynsparse.distributed import gather, split
from dynsparse.distributed.sharded_layer import spec_of
from dynsparse.ops.linear import products
from dynsparse.training import ConstantSchedule

SCHEDULES = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
    "zero bubble V": ScheduleZBVZeroBubble,
}
EVERY = ConstantSchedule(10**6, 2, 0.2)
ALGORITHMS = {
    "rigl": lambda m, o, **r: ds.RigL(m, o, schedule=EVERY, **r),
    "set": lambda m, o, **r: ds.SET(m, o, schedule=EVERY, seed=1, **r),
}
MICRO = 4


class Part(nn.Sequential):
    """Some of the model's modules, under their names in the model."""

    def __init__(self, modules):
        super().__init__()
        for name, module in modules:
            self.add_module(name, module)


def whole_model():
    g = torch.Generator().manual_seed(0)
    sizes, modules = (16, 24, 24, 24, 8), []
    for a, b in pairwise(sizes):
        layer = ds.nn.SparseLinear(a, b, 0.2, dtype=torch.float64, generator=g)
        modules.append(nn.Sequential(layer, nn.Tanh()))
    return Part([(str(i), module) for i, module in enumerate(modules)])


def batch(step, replica=0, replicas=1):
    g = torch.Generator().manual_seed(step)
    pair = torch.randn(16, 16, generator=g), torch.randn(16, 8, generator=g)
    return tuple(t.double().chunk(replicas)[replica] for t in pair)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def reference(algorithm, steps):
    model = whole_model()
    optimizer = optimizer_of(model)
    trainer = ALGORITHMS[algorithm](model, optimizer, ranks=None)
    seen = []
    for step in range(1, steps + 1):
        x, y = batch(step)
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        trainer.step()
        seen.append(weights(model))
    return seen


def make_pieces(schedule, at, deep):
    """Return {number: stage} for the stages of rank `at` of `deep`."""
    parts = list(whole_model().named_children())
    if schedule in ("GPipe", "1F1B"):
        share = len(parts) // deep
        return {at: Part(parts[at * share : (at + 1) * share])}
    numbers = (at, 2 * deep - 1 - at) if schedule == "zero bubble V" else (at, at + deep)
    return {i: Part(parts[i : i + 1]) for i in numbers}


def make_step(schedule, pieces, count, group):
    """Return a function of x and y that runs forward and backward passes of this rank's stages."""
    device = torch.device("cpu")
    made = [PipelineStage(piece, i, count, device, group=group) for i, piece in pieces.items()]
    runner = SCHEDULES[schedule](
        made[0] if len(made) == 1 else made, n_microbatches=MICRO, loss_fn=mse_loss
    )

    def step(x, y):
        inputs = [x] if 0 in pieces else []
        runner.step(*inputs, **({"target": y} if count - 1 in pieces else {}))

    return step


def compare(run_passes, holder, trainer, algorithm, steps, shares, seen=weights):
    """Train this rank's layers and compare them with those of one process.

    Returns:
        ((patterns equal, difference of weights) after each step, numbers of pairs that growth
        observed per layer, whether any pattern changed).
    """
    pairs, observe = [], trainer.history.observe
    trainer.history.observe = lambda name, found: (pairs.append(len(found)), observe(name, found))
    expected, found = reference(algorithm, steps), []
    for step in range(1, steps + 1):
        trainer.optimizer.zero_grad()
        run_passes(*batch(step, *shares))
        trainer.step()
        mine = {name: expected[step - 1][name] for name in layers_of(holder)}
        found.append(apart(mine, seen(holder)))
    return found, sorted(set(pairs)), not apart(expected[0], expected[-1])[0]


def train_stages(rank, size, schedule, algorithm, steps, replicas=1, ddp=False):
    """Train pipeline stages; replicas are sharded by `fully_shard`, or wrapped by
    `DistributedDataParallel`."""
    deep = size // replicas
    mesh = init_device_mesh("cpu", (replicas, deep), mesh_dim_names=("replica", "stage"))
    own = mesh["replica"].get_group()
    pieces = make_pieces(schedule, mesh["stage"].get_local_rank(), deep)
    holder = Part([pair for piece in pieces.values() for pair in piece.named_children()])
    modules = dict(pieces)
    for i, piece in pieces.items():
        if ddp:
            modules[i] = DistributedDataParallel(
                piece, process_group=own, find_unused_parameters=True
            )
        elif replicas > 1:
            shard(piece, mesh["replica"])
    passes = make_step(schedule, modules, deep * len(pieces), mesh["stage"].get_group())
    ranks = own if replicas > 1 else None
    trainer = ALGORITHMS[algorithm](holder, optimizer_of(holder), ranks=ranks)
    shares = mesh["replica"].get_local_rank(), replicas
    return compare(passes, holder, trainer, algorithm, steps, shares)


def train_tensor_parallel_stages(rank, size, schedule, algorithm, steps, replicas=1):
    """Like `train_stages`, for two stages whose layers are tensor-parallel over x, with `replicas`
    data-parallel ranks over z."""
    names = ("stage", "z", "x")
    mesh = init_device_mesh("cpu", (2, replicas, size // 2 // replicas), mesh_dim_names=names)
    own = mesh["z", "x"] if replicas > 1 else mesh["x"]
    pieces = make_pieces(schedule, mesh["stage"].get_local_rank(), 2)
    (holder,) = pieces.values()
    split(holder, own)
    assert any(spec_of(one).axes for one in layers_of(holder).values())
    passes = make_step(schedule, pieces, 2, mesh["stage"].get_group())
    trainer = ALGORITHMS[algorithm](holder, optimizer_of(holder), ranks=own)

    def passes_with_mean_gradients(x, y):
        passes(x, y)
        for parameter in holder.parameters():
            trainer.ranks.sum(parameter.grad).div_(replicas)

    shares = mesh["z"].get_local_rank(), replicas
    return compare(
        passes_with_mean_gradients, holder, trainer, algorithm, steps, shares, gathered_weights
    )


def gathered_weights(model):
    """`weights` of tensor-parallel layers."""
    state, found = gather(model), {}
    for name, layer in layers_of(model).items():
        rows, cols, values = (state[f"{name}.{key}"] for key in ("rows", "cols", "values"))
        spec = spec_of(layer)
        shape = layer.pattern.shape if spec is None else spec.shape
        pattern = ds.SparsePattern(rows, cols, shape=shape)
        found[name] = pattern.sorted_flat, pattern.to_dense(values)
    return found


def count_backward_products(rank, size):
    """Return {schedule: [calls computing grad_input, grad_weight]} of one step without capture."""
    backward, found = products.backward, {}
    for schedule in SCHEDULES:
        pieces = make_pieces(schedule, rank, size)
        passes = make_step(schedule, pieces, size * len(pieces), torch.distributed.group.WORLD)
        calls = []

        def counted(dy, x, values, p, need_input, *kept, calls=calls, **more):
            calls.append((need_input, x is not None))
            return backward(dy, x, values, p, need_input, *kept, **more)

        products.backward = counted
        passes(*batch(1))
        products.backward = backward
        found[schedule] = [sum(of) for of in zip(*calls, strict=True)]
    return found


def train_all_tensor_parallel_stages(rank, size, ways, steps, replicas=1):
    return {way: train_tensor_parallel_stages(rank, size, *way, steps, replicas) for way in ways}


def train_all_stages(rank, size, ways, steps, replicas=1, ddp=False):
    return {way: train_stages(rank, size, *way, steps, replicas, ddp) for way in ways}
