"""Functions of the tests of sharded values that run on every rank."""

from __future__ import annotations

import pytest
import sharded_models as models
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

import dynsparse as ds
from dynsparse.ops import capture

POLICIES = {
    "reshard": {"reshard_after_forward": True},
    "keep": {"reshard_after_forward": False},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def compare_static_training(rank, size):
    """Compare static training under each sharding policy with one process.

    Returns:
        {policy: largest difference of weights and outputs}.
    """
    mesh = init_device_mesh("cpu", (size,))
    found = {}
    for name, policy in POLICIES.items():
        model, reference = models.shard(models.Mixed(), mesh, **policy), models.Mixed()
        pair = [
            (m, ds.Static(m, torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-4)))
            for m in (model, reference)
        ]
        assert all(isinstance(m.values, DTensor) for m in models.layers_of(model).values())
        for step in range(4):
            for (one, trainer), part in zip(pair, [(rank, size), (0, 1)], strict=True):
                x, y = models.share_of_ids(step, *part)
                trainer.optimizer.zero_grad()
                mse_loss(one(x), y).backward()
                trainer.step()
        found[name] = models.off_by(model, reference)
        with torch.no_grad():
            x, _ = models.share_of_ids(9, rank, size)
            found[name] = max(found[name], float((model(x) - reference(x)).abs().max()))
    return found


def compare_mixed_precision(rank, size):
    """Return {layer: relative error of the gradient} with bfloat16 passes and float32 values."""
    mesh = init_device_mesh("cpu", (size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = models.shard(models.Mixed(torch.float32), mesh, mp_policy=policy)
    reference = models.Mixed(torch.float32)
    for one, part in ((model, (rank, size)), (reference, (0, 1))):
        x, y = models.share_of_ids(0, *part, dtype=torch.float32)
        mse_loss(one(x).float(), y).backward()
    found = {}
    for name, layer in models.layers_of(model).items():
        expected = models.layers_of(reference)[name].values.grad
        grad = layer.values.grad.full_tensor()
        assert grad.dtype == torch.float32
        found[name] = float((grad - expected).norm() / expected.norm())
    return found


def check_captured_pairs(rank, size):
    """Check that growth captures the pairs of every pass under each sharding policy."""
    mesh = init_device_mesh("cpu", (size,))
    bfloat16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for policy in ({}, POLICIES["keep"], {"mp_policy": bfloat16}):
        model = models.shard(models.linear_model(dtype=torch.float32), mesh, **policy)
        layers = models.layers_of(model).values()
        held = [capture.start(layer.index.row_ptr, layer.values) for layer in layers]

        def passes(count, reduced, model=model):
            for i in range(count):
                model.set_requires_gradient_sync(reduced or i == count - 1)
                x, y = models.share(0, rank, size, torch.float32)
                mse_loss(model(x).float(), y).backward()

        for reduced in (True, False):
            passes(3, reduced)
            assert [len(pairs) for pairs in held] == [3, 3]
            passes(2, reduced)  # on top of the same gradient
            assert [len(pairs) for pairs in held] == [5, 5]
            for pairs in held:
                pairs.clear()
            model.zero_grad()
    return True


def check_states_and_errors(rank, size):
    """Check state dicts of sharded layers, and the errors where one shard is not enough."""
    mesh = init_device_mesh("cpu", (size,))
    model = models.shard(models.linear_model(), mesh)
    other = models.shard(models.linear_model(seed=1), mesh)
    other.load_state_dict(model.state_dict())
    reference = models.linear_model()
    assert models.off_by(other, reference) == 0
    assert other[0].pattern == reference[0].pattern
    x, _ = models.share(0, rank, size)
    assert torch.equal(other(x), reference(x))
    with pytest.raises(RuntimeError, match="are sharded"):
        other[0].rewire(ds.pattern.Rewiring.between(other[0].pattern, other[0].pattern))
    forward = type(reference[0]).forward  # past the hook that gathers
    with pytest.raises(RuntimeError, match="call the module that fully_shard was given"):
        forward(other[0], x)
    with torch.no_grad(), pytest.raises(RuntimeError, match="are sharded"):
        other[0].snapshot()
    other[0].resizable = True
    with pytest.raises(ValueError, match="number of blocks"):
        other[0].set_pattern(ds.SparsePattern.random(other[0].pattern.shape, nnz=3))
    return True
