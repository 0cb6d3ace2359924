"""torch's `parallelize_module` with styles for sparse layers: in one process and on gloo ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from spawned import spawned
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dynsparse as ds
from dynsparse.distributed import Cluster, gather, make_plan, measure, split


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


def made():
    torch.manual_seed(0)
    return Block(), torch.randn(4, 5, 24).double()


def parallelized(rank):
    from torch.distributed.tensor.parallel import parallelize_module

    model, x = made()
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
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.copy_(parameter.grad)
    for key, tensor in gather(own).items():
        if not key.endswith(("rows", "cols")):
            expected = model.get_parameter(key).grad
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-12)
    figures = measure(mesh)
    return held, figures.to_dict()


def test_two_processes_compute_what_one_does():
    model, _ = made()
    whole = sum(p.numel() for p in model.parameters())
    (first, figures), (second, others) = spawned(2, parallelized)
    assert figures == others  # all ranks have the same
    assert figures["slowness"] > 0
    assert figures["inner"]["bandwidth"] > 1e6
    shared = sum(model.get_submodule(n).bias.numel() for n in ("down", "last"))
    shared += model.attention.out_proj.bias.numel()
    assert first + second == whole + shared


def meshed(rank):
    model = nn.Sequential(
        ds.nn.SparseLinear(32, 64, 0.3, dtype=torch.float64),
        nn.ReLU(),
        ds.nn.SparseLinear(64, 32, 0.3, dtype=torch.float64),
        nn.Linear(32, 8, dtype=torch.float64),
    )
    x, dy = torch.randn(8, 32).double(), torch.randn(8, 8).double()
    whole = copy.deepcopy(model)
    whole(x).backward(dy / 8)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("z", "x"))
    plan = make_plan(model, mesh, batch=8, cluster=Cluster(flops=1e6))
    assert plan.grid == (2, 1, 2)
    assert plan.placements["0"].rows == plan.placements["2"].cols == "x"
    split(model, mesh, plan)
    data = nn.parallel.DistributedDataParallel(model, process_group=mesh["z"].get_group())
    z = mesh["z"].get_local_rank()
    y = data(x.chunk(2)[z])
    torch.testing.assert_close(y, whole(x).chunk(2)[z], rtol=0, atol=1e-12)
    y.backward(dy.chunk(2)[z] / 4)  # DDP takes the mean over its ranks
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    for key, tensor in gather(model).items():
        if not key.endswith(("rows", "cols")):
            expected = whole.get_parameter(key).grad
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-12)
    return True


@pytest.mark.slow
def test_four_processes_split_layers_and_samples():
    assert spawned(4, meshed) == [True] * 4


def test_styles_for_other_modules_are_refused(tmp_path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        d = ds.distributed
        with pytest.raises(TypeError, match=r"expected a SparseLinear in Linear, got Linear"):
            d.SplitRows()._apply(nn.Linear(3, 3), mesh)
        with pytest.raises(
            TypeError, match=r"expected a SparseLinear named 'a' in Block, got None"
        ):
            d.SplitPair("a", "b")._apply(Block(), mesh)
        with pytest.raises(ValueError, match=r"'up' writes 64 features and 'wide' reads 24"):
            d.SplitPair("up", "wide")._apply(Block(), mesh)
        with pytest.raises(TypeError, match=r"expected a SparseMultiheadAttention, got Block"):
            d.SplitHeads()._apply(Block(), mesh)
    finally:
        torch.distributed.destroy_process_group()
