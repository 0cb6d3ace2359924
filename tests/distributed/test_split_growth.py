"""Growth of tensor-parallel layers selects the positions of one process, also with ties."""

from __future__ import annotations

import copy

import pytest
import torch
from fake_ranks import force_exchange
from grids import GRIDS, on_grid
from hypothesis import given
from hypothesis import strategies as st
from test_split import chain, samples

import dynsparse as ds
from dynsparse.distributed import split
from dynsparse.distributed.sharded_layer import spec_of
from dynsparse.ops import capture
from dynsparse.ops.grow import topk_outside
from dynsparse.ranks import GrowRequest, topk_over_ranks


def grow_on_mesh(sizes, model, x, dy, counts, pooling="sum"):
    """Return, per layer, the positions in the full layer that the ranks of a mesh grow."""
    names = [name for name, m in model.named_modules() if isinstance(m, ds.nn.SparseLinear)]

    def work(grid):
        own = split(copy.deepcopy(model), grid)
        layers = [own.get_submodule(name) for name in names]
        waiting = [capture.start(layer.index.row_ptr, layer.values) for layer in layers]
        own(samples(x, grid)).backward(samples(dy, grid))
        wanted = [
            GrowRequest(name, list(pairs), layer.pattern, count, spec=spec_of(layer))
            for name, pairs, layer, count in zip(names, waiting, layers, counts, strict=True)
        ]
        found = topk_over_ranks(grid.z, wanted, pooling=pooling)
        return [
            spec_of(layer).to_full(flat, layer.block_size)
            for layer, flat in zip(layers, found, strict=True)
        ]

    results = on_grid(sizes, work)
    for i in range(len(names)):
        # Ranks along z hold the same shard and get the same positions.
        for (px, py, _), flats in results.items():
            assert torch.equal(flats[i], results[px, py, 0][i])
    return [
        torch.cat([f[i] for (_, _, z), f in results.items() if z == 0]).unique()
        for i in range(len(names))
    ]


def grow_in_one_process(model, x, dy, counts, pooling="sum"):
    layers = [m for m in model.modules() if isinstance(m, ds.nn.SparseLinear)]
    waiting = [capture.start(layer.index.row_ptr, layer.values) for layer in layers]
    model(x).backward(dy)
    return [
        topk_outside(list(pairs), layer.pattern, count, pooling=pooling).flat.sort().values
        for pairs, layer, count in zip(waiting, layers, counts, strict=True)
    ]


@pytest.mark.parametrize("exchange", ["gradients", "samples"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("sizes", GRIDS)
def test_grown_positions_equal_one_process(sizes, block_size, exchange):
    model = chain(block_size)
    x, dy = torch.randn(8, 48).double(), torch.randn(8, 64).double()
    counts = [int(0.3 * layer.pattern.nnz) for layer in (model[0], model[2])]
    expected = grow_in_one_process(model, x, dy, counts)
    with force_exchange(exchange):
        found = grow_on_mesh(sizes, model, x, dy, counts)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@given(st.sampled_from([(2, 2, 1), (2, 1, 2), (3, 1, 1)]), st.integers(0, 2**16), st.data())
def test_ties_are_broken_by_position_in_the_full_layer(sizes, seed, data):
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(
        ds.nn.SparseLinear(6, 9, 0.4, bias=False, dtype=torch.float64, generator=generator)
    )
    free = model[0].pattern.total - model[0].pattern.nnz
    count = data.draw(st.integers(0, free))
    x = torch.randint(-1, 2, (4, 6), generator=generator).double()
    dy = torch.randint(-1, 2, (4, 9), generator=generator).double()
    expected = grow_in_one_process(model, x, dy, [count])
    (found,) = grow_on_mesh(sizes, model, x, dy, [count])
    assert torch.equal(found, expected[0])


def test_empty_shard_may_grow():
    pattern = ds.SparsePattern([0, 0, 1, 1, 2, 3], [0, 1, 0, 1, 2, 3], shape=(4, 4))
    model = torch.nn.Sequential(ds.nn.SparseLinear(4, 4, pattern=pattern, dtype=torch.float64))
    sizes = (2, 2, 1)
    x, dy = torch.ones(2, 4).double(), torch.tensor([[1.0, 5.0, 1.0, 1.0]] * 2).double()
    expected = grow_in_one_process(model, x, dy, [2])
    (found,) = grow_on_mesh(sizes, model, x, dy, [2])
    assert torch.equal(found, expected[0])
    assert found.tolist() == [6, 7]  # both in the shard of rows 0 and 1, columns 2 and 3
