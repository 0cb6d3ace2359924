"""Trainings whose values are sharded by `fully_shard`, compared with one process."""

from __future__ import annotations

from itertools import pairwise

import pytest
import sharded_models
import torch
from rank_trainings import (
    ALGORITHMS,
    apart,
    backward,
    batch,
    layers_of,
    model_of,
    optimizer_of,
    weights,
)
from sharded_models import whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

import dynsparse as ds

FIXED = [
    "rigl", "rigl-global", "rigl-regrow", "rigl-step", "rigl-own-start", "set",
    "snfs-fixed", "mest", "deepr", "topkast",
]  # fmt: skip
"""What keeps the number of blocks of every layer."""

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01, initial_accumulator_value=0.1),
}


def shard(model, mesh=None, size=None, **options):
    mesh = init_device_mesh("cpu", (size,)) if mesh is None else mesh
    return sharded_models.shard(model, mesh, **options)


def train(name, model, optimizer, steps, rank, size, ranks="auto", passes=1):
    """Return weights and optimizer state after each step."""
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    trainer = ALGORITHMS[name](model, optimizer, ranks=ranks)
    seen = []
    for step in range(1, steps + 1):
        backward(model, optimizer, step, rank, size, passes)
        trainer.step()
        state = {
            (n, key): layer.pattern.by_rows(whole(t)).clone()
            for n, layer in layers_of(model).items()
            for key, t in optimizer.state.get(layer.values, {}).items()
            if t.dim()
        }
        grads = {
            n: layer.pattern.by_rows(whole(layer.values.grad)).clone()
            for n, layer in layers_of(model).items()
        }
        seen.append((weights(model), state | grads))
    return seen


def compare_algorithms(rank, size, names, steps, optimizer="sgd", block_size=1, **options):
    """Compare each algorithm with one process.

    Returns:
        {name: (steps with equal patterns, difference of weights, difference of optimizer state and
        gradients, whether a pattern changed)}.
    """
    found = {}
    for name in names:
        shape = {"block_size": block_size, "density": 0.2 if block_size == 1 else 0.5}
        model = shard(model_of(**shape), size=size, **options)
        seen = train(name, model, optimizer, steps, rank, size)
        assert all(isinstance(layer.values, DTensor) for layer in layers_of(model).values())
        reference = train(name, model_of(**shape), optimizer, steps, 0, 1, ranks=None)
        against = [apart(a, b) for (a, _), (b, _) in zip(reference, seen, strict=True)]
        state = max(
            (
                float((one[key] - other[key]).abs().max())
                for (_, one), (_, other) in zip(reference, seen, strict=True)
                for key in one
            ),
            default=0.0,
        )
        changed = any(not apart(a, b)[0] for (a, _), (b, _) in pairwise(reference))
        found[name] = (
            sum(same for same, _ in against), max(d for _, d in against), state, changed,
        )  # fmt: skip
    return found


def compare_hybrid_sharding(rank, size, names, steps):
    """Train two replicas of a model, each sharded over half of the ranks."""
    found = {}
    for name in names:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        seen = train(name, shard(model_of(), mesh), "adam", steps, rank, size)
        reference = train(name, model_of(), "adam", steps, 0, 1, ranks=None)
        found[name] = [apart(a, b) for (a, _), (b, _) in zip(reference, seen, strict=True)]
    return found


def compare_micro_batches(rank, size):
    """Train with three micro-batches; reduce gradients after each, or after the last one."""
    found = []
    reference = train("rigl", model_of(), "sgd", 5, 0, 1, ranks=None, passes=3)
    for each in (True, False):
        model = shard(model_of(), size=size)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        trainer = ALGORITHMS["rigl"](model, optimizer)
        for step in range(1, 6):
            optimizer.zero_grad()
            parts = zip(*(t.chunk(3) for t in batch(step, rank, size)), strict=True)
            for i, (x, y) in enumerate(parts):
                model.set_requires_gradient_sync(each or i == 2)
                (mse_loss(model(x), y) / 3).backward()
            trainer.step()
            found.append(apart(reference[step - 1][0], weights(model)))
    return found


def train_in_mixed_precision(rank, size):
    """Train with bfloat16 passes and float32 values; return the patterns."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(model_of(dtype=torch.float32), size=size, mp_policy=policy)
    optimizer = optimizer_of(model)
    trainer = ALGORITHMS["rigl"](model, optimizer)
    for step in range(1, 21):
        optimizer.zero_grad()
        x, y = batch(step, rank, size, dtype=torch.float32)
        mse_loss(model(x).float(), y).backward()
        assert trainer.step() is not None
    return {name: flat for name, (flat, _) in weights(model).items()}


def step_in_turn(rank, size):
    """Let trainer and optimizer step in turn with gradients that are set to zero in place."""
    model = shard(model_of(), size=size)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    trainer = ds.Static(model, optimizer)
    for step, take in enumerate([trainer.step, optimizer.step, trainer.step]):
        optimizer.zero_grad(set_to_none=False)
        x, y = batch(step, rank, size)
        mse_loss(model(x), y).backward()
        take()
    with pytest.raises(RuntimeError, match="would step a second time with a gradient"):
        optimizer.step()
    return trainer.steps


def first_error(model, optimizer, trainer, rank, size):
    """Return the error of the first failing update, which must change no weight."""
    for step in range(1, 12):
        backward(model, optimizer, step, rank, size)
        trainer.before_optimizer_step()
        optimizer.step()
        before = weights(model)
        try:
            trainer.after_optimizer_step()
        except RuntimeError as error:
            assert apart(before, weights(model)) == (True, 0.0)
            return str(error)
    return "none"


def check_unsupported(rank, size):
    """Return the errors of operations that sharded values do not support."""
    said = []
    gradual = {"total_steps": 12, "final_density": 0.05, "update_interval": 2}
    makers = [ALGORITHMS[name] for name in ("snfs", "mest-soft")]
    makers += [lambda m, o: ds.GMP(m, o, **gradual), lambda m, o: ds.GraNet(m, o, **gradual)]
    for make in makers:
        model = shard(model_of(), size=size)
        optimizer = optimizer_of(model)
        trainer = make(model, optimizer)
        said.append(first_error(model, optimizer, trainer, rank, size))
        assert "their number must stay" in said[-1], (type(trainer), said)
    model = shard(model_of(), size=size)
    with pytest.raises(ValueError, match="are sharded over 2 ranks, which must decide together"):
        ds.SET(model, optimizer_of(model), total_steps=9, update_interval=1, ranks=None)
    with pytest.raises(ValueError, match="disagree on the pattern of a sparse layer") as found:
        shard(model_of(seed=rank), size=size)
    said.append(str(found.value))
    model = shard(model_of(), size=size)
    optimizer = optimizer_of(model)
    trainer = ds.SET(model, optimizer, total_steps=9, update_interval=1)
    model.set_reshard_after_backward(False)
    backward(model, optimizer, 1, rank, size)
    with pytest.raises(RuntimeError, match=r"call reshard\(\)"):
        trainer.step()
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    assert trainer.step() is not None
    said.append(run_out_of_memory_on_one_rank(rank, size))
    return said


def run_out_of_memory_on_one_rank(rank, size):
    """Return the error when the last rank runs out of memory; the next update succeeds."""
    model = shard(model_of(), size=size)
    optimizer = optimizer_of(model)
    trainer = ds.SET(model, optimizer, total_steps=9, update_interval=1)
    layer = layers_of(model)["2"]
    if rank == size - 1:
        layer.prepare_pattern = _no_room
    backward(model, optimizer, 1, rank, size)
    before = weights(model)
    with pytest.raises(RuntimeError, match="rank 1: layer '2': MemoryError: no room") as found:
        trainer.step()
    assert apart(before, weights(model))[0]
    vars(layer).pop("prepare_pattern", None)
    backward(model, optimizer, 2, rank, size)
    assert trainer.step() is not None
    return str(found.value)


def _no_room(*_):
    raise MemoryError("no room")


def compare_with_options(rank, size, names, steps, optimizer, block_size, options):
    return compare_algorithms(rank, size, names, steps, optimizer, block_size, **options)
