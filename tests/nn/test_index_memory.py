"""Memory of a layer beside its values: 4 bytes of index per block, and 4 of slots once a trainer
changes the pattern."""

import pytest
import torch
import torch.distributed as dist
from kernels_of import needs_kernels
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.ops.linear.cuda import dense

SAMPLES = 600  # enough for panels of single elements


def held(layer):
    """Return the bytes of all tensors reachable from a layer, except parameters and gradients."""
    storages, seen, waiting = {}, set(), [layer]
    own = {id(parameter) for parameter in layer.parameters()}
    memory = {p.untyped_storage().data_ptr() for p in layer.parameters() if type(p) is nn.Parameter}
    while waiting:
        found = waiting.pop()
        if id(found) in seen or id(found) in own:
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(found, dict):
            waiting += found.values()
        elif isinstance(found, (list, tuple)):
            waiting += found
        elif type(found).__module__.startswith("dynsparse.") or isinstance(found, nn.Module):
            waiting += vars(found).values() if hasattr(found, "__dict__") else []
            slots = [n for kind in type(found).__mro__ for n in getattr(kind, "__slots__", ())]
            waiting += [getattr(found, n) for n in slots if n[0] != "_" or n == "_derived"]
    return sum(size for address, size in storages.items() if address not in memory)


def pointers(layer):
    return 4 * (sum(layer.pattern.grid) + 2)


def train(model, make, steps=8):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trainer = make(model, optimizer)
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(SAMPLES, 256, generator=g)).square().mean().backward()
        trainer.step()
    return trainer


def rigl(model, optimizer):
    return ds.RigL(model, optimizer, total_steps=30, update_interval=3)


def network():
    g = torch.Generator().manual_seed(0)
    return nn.Sequential(
        SparseLinear(256, 320, 0.2, generator=g),
        nn.Tanh(),
        SparseLinear(320, 256, 0.2, 8, generator=g),
    )


@needs_kernels  # the others compute without it
def test_inference_builds_no_column_order():
    model = network()
    with torch.no_grad():
        model(torch.randn(SAMPLES, 256))
    for layer in (model[0], model[2]):
        assert layer._state.index.order is None
    spent = held(model[2])
    assert spent <= 4 * model[2].pattern.nnz + 2 * pointers(model[2])
    x = torch.randn(SAMPLES, 256, requires_grad=True)
    model(x).sum().backward()
    order = model[2]._state.index.order
    assert held(model[2]) == spent + 8 * model[2].pattern.nnz
    model(x).sum().backward()
    assert model[2]._state.index.order is order
    by_columns = model[2].pattern.index
    assert torch.equal(order[0], by_columns.csc_rows)
    assert torch.equal(order[1], by_columns.csc_perm)


@pytest.mark.parametrize("make", [ds.Static, rigl])
def test_off_the_cpu(off_cpu, monkeypatch, make):
    monkeypatch.setattr(dense, "KEPT_LINES", 320 * 256 // 5)  # of the first layer, the larger one
    model = network()
    trainer = train(model, make)
    assert trainer.updates == (2 if make is rigl else 0)
    each = 8 if make is rigl else 4  # columns, and slots where updates change the pattern
    for layer in (model[0], model[2]):
        # The pattern that was drawn on the CPU stays there; those of the device are in the index.
        here = 0 if make is rigl else layer.pattern.cols.nbytes + layer.pattern.row_ptr.nbytes
        kept = 8 * layer.pattern.nnz * layer.block_size
        assert held(layer) - here == each * layer.pattern.nnz + pointers(layer) + kept
    monkeypatch.setattr(dense, "KEPT_LINES", 0)
    train(model := network(), make)
    here = 0 if make is rigl else model[0].pattern.cols.nbytes + model[0].pattern.row_ptr.nbytes
    assert held(model[0]) - here == each * model[0].pattern.nnz + pointers(model[0])


@pytest.mark.parametrize("make", [ds.Static, rigl])
def test_with_sharded_values(tmp_path, make):
    reference, model = network(), network()
    train(reference, make)
    store = dist.FileStore(str(tmp_path / "s"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        trainer = train(fully_shard(model, mesh=mesh), make)
        assert trainer.updates == (2 if make is rigl else 0)
        for own, other in ((model[0], reference[0]), (model[2], reference[2])):
            assert own.pattern == other.pattern
            assert torch.equal(own.to_dense(), other.to_dense())
            spent = held(own)
            each = 8 if make is rigl else 4
            assert spent <= each * own.pattern.nnz + 2 * pointers(own)
    finally:
        dist.destroy_process_group()
