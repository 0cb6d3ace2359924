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


def train_stages(rank, size, schedule, algorithm, steps, replicas=1):
    """Train pipeline stages and compare this rank's layers with those of one process.

    Returns:
        ((patterns equal, difference of weights) after each step, numbers of pairs that growth
        observed per layer, whether any pattern changed).
    """
    deep = size // replicas
    mesh = init_device_mesh("cpu", (replicas, deep), mesh_dim_names=("replica", "stage"))
    stages, own = mesh["stage"].get_group(), mesh["replica"].get_group()
    at, replica = mesh["stage"].get_local_rank(), mesh["replica"].get_local_rank()
    parts = list(whole_model().named_children())
    kind = SCHEDULES[schedule]
    if schedule in ("GPipe", "1F1B"):
        share = len(parts) // deep
        pieces = {at: Part(parts[at * share : (at + 1) * share])}
    elif schedule == "zero bubble V":
        pieces = {i: Part(parts[i : i + 1]) for i in (at, 2 * deep - 1 - at)}
    else:
        pieces = {i: Part(parts[i : i + 1]) for i in (at, at + deep)}
    count = deep * len(pieces)
    holder = Part([pair for piece in pieces.values() for pair in piece.named_children()])
    if replicas > 1:
        for piece in pieces.values():
            shard(piece, mesh["replica"])
    device = torch.device("cpu")
    made = [PipelineStage(piece, i, count, device, group=stages) for i, piece in pieces.items()]
    runner = kind(made[0] if len(made) == 1 else made, n_microbatches=MICRO, loss_fn=mse_loss)
    optimizer = optimizer_of(holder)
    trainer = ALGORITHMS[algorithm](holder, optimizer, ranks=own if replicas > 1 else None)
    pairs, observe = [], trainer.history.observe
    trainer.history.observe = lambda name, found: (pairs.append(len(found)), observe(name, found))
    first, last = 0 in pieces, count - 1 in pieces
    expected, found = reference(algorithm, steps), []
    for step in range(1, steps + 1):
        x, y = batch(step, replica, replicas)
        optimizer.zero_grad()
        runner.step(*([x] if first else []), **({"target": y} if last else {}))
        trainer.step()
        mine = {name: expected[step - 1][name] for name in layers_of(holder)}
        found.append(apart(mine, weights(holder)))
    changed = not apart(expected[0], expected[-1])[0]
    return found, sorted(set(pairs)), changed


def count_backward_products(rank, size):
    """Return {schedule: [calls computing grad_input, grad_weight]} of one step without capture."""
    stages, found = torch.distributed.group.WORLD, {}
    backward = products.backward
    for schedule, kind in SCHEDULES.items():
        parts = list(whole_model().named_children())
        if schedule in ("GPipe", "1F1B"):
            pieces = {rank: Part(parts[2 * rank : 2 * rank + 2])}
        elif schedule == "zero bubble V":
            pieces = {i: Part(parts[i : i + 1]) for i in (rank, 3 - rank)}
        else:
            pieces = {i: Part(parts[i : i + 1]) for i in (rank, rank + 2)}
        count, device = size * len(pieces), torch.device("cpu")
        made = [PipelineStage(p, i, count, device, group=stages) for i, p in pieces.items()]
        runner = kind(made[0] if len(made) == 1 else made, n_microbatches=MICRO, loss_fn=mse_loss)
        calls = []

        def counted(dy, x, values, p, need_input, *kept, calls=calls, **more):
            calls.append((need_input, x is not None))
            return backward(dy, x, values, p, need_input, *kept, **more)

        products.backward = counted
        x, y = batch(1)
        runner.step(*([x] if 0 in pieces else []), **({"target": y} if count - 1 in pieces else {}))
        products.backward = backward
        found[schedule] = [sum(of) for of in zip(*calls, strict=True)]
    return found


def train_replicated_stages(rank, size, schedule, steps):
    """Like `train_stages`, with stages that `DistributedDataParallel` replicates."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replica", "stage"))
    stages, own = mesh["stage"].get_group(), mesh["replica"].get_group()
    at, deep = mesh["stage"].get_local_rank(), size // 2
    parts = list(whole_model().named_children())
    piece = Part(parts[at * len(parts) // deep : (at + 1) * len(parts) // deep])
    ddp = DistributedDataParallel(piece, process_group=own, find_unused_parameters=True)
    stage = PipelineStage(ddp, at, deep, torch.device("cpu"), group=stages)
    runner = SCHEDULES[schedule](stage, n_microbatches=MICRO, loss_fn=mse_loss)
    optimizer = optimizer_of(piece)
    trainer = ALGORITHMS["rigl"](piece, optimizer, ranks=own)
    expected, found = reference("rigl", steps), []
    for step in range(1, steps + 1):
        x, y = batch(step, mesh["replica"].get_local_rank(), 2)
        optimizer.zero_grad()
        runner.step(*([x] if at == 0 else []), **({"target": y} if at == deep - 1 else {}))
        trainer.step()
        mine = {name: expected[step - 1][name] for name in layers_of(piece)}
        found.append(apart(mine, weights(piece)))
    return found


def train_tensor_parallel_stages(rank, size, schedule, algorithm, steps, replicas=1):
    """Like `train_stages`, for two stages whose layers are tensor-parallel over x, with `replicas`
    data-parallel ranks over z."""
    names = ("stage", "z", "x")
    mesh = init_device_mesh("cpu", (2, replicas, size // 2 // replicas), mesh_dim_names=names)
    at, stages, z = mesh["stage"].get_local_rank(), mesh["stage"].get_group(), mesh["z"]
    own = mesh["z", "x"] if replicas > 1 else mesh["x"]
    parts = list(whole_model().named_children())
    holder = Part(parts[2 * at : 2 * at + 2])
    split(holder, own)
    assert any(spec_of(one).axes for one in layers_of(holder).values())
    stage = PipelineStage(holder, at, 2, torch.device("cpu"), group=stages)
    runner = SCHEDULES[schedule](stage, n_microbatches=MICRO, loss_fn=mse_loss)
    optimizer = optimizer_of(holder)
    trainer = ALGORITHMS[algorithm](holder, optimizer, ranks=own)
    pairs, observe = [], trainer.history.observe
    trainer.history.observe = lambda name, found: (pairs.append(len(found)), observe(name, found))
    expected, found = reference(algorithm, steps), []
    for step in range(1, steps + 1):
        x, y = batch(step, z.get_local_rank(), replicas)
        optimizer.zero_grad()
        runner.step(*([x] if at == 0 else []), **({"target": y} if at == 1 else {}))
        for parameter in holder.parameters():
            trainer.ranks.sum(parameter.grad).div_(replicas)
        trainer.step()
        mine = {}
        for name, state in gathered_layers(holder).items():
            shape = expected[step - 1][name][1].shape
            pattern = ds.SparsePattern(state["rows"], state["cols"], shape=shape)
            mine[name] = pattern.sorted_flat, pattern.to_dense(state["values"])
        found.append(apart({name: expected[step - 1][name] for name in mine}, mine))
    changed = not apart(expected[0], expected[-1])[0]
    return found, sorted(set(pairs)), changed


def gathered_layers(model):
    state = gather(model)
    return {
        name: {key: state[f"{name}.{key}"] for key in ("rows", "cols", "values")}
        for name in layers_of(model)
    }


def train_all_tensor_parallel_stages(rank, size, ways, steps, replicas=1):
    return {way: train_tensor_parallel_stages(rank, size, *way, steps, replicas) for way in ways}


def train_all_stages(rank, size, ways, steps, replicas=1):
    return {way: train_stages(rank, size, *way, steps, replicas) for way in ways}
