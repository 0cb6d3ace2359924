"""1,024 ranks on paper against one rank that counts what it sends among 1,024."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.distributed import Cluster, split
from dynsparse.distributed.chains import find_chains
from dynsparse.distributed.paper import Matrix, held, ring, traffic
from dynsparse.distributed.placement import Placement
from dynsparse.distributed.plan import Candidate, Plan
from dynsparse.distributed.search import Grid, Search
from dynsparse.ranks import (
    CountingRanks,
    GrowthWanted,
    RankGrid,
    chunk_of,
    joined,
    select_over_ranks,
    topk_over_ranks,
)

RANKS = 1024


@pytest.mark.parametrize(("block_size", "samples"), [(1, 10**6), (4, 10**6), (1, 8)])
def test_an_update_sends_what_the_formula_says(block_size, samples):
    shape = 8192, 4096
    pattern = ds.SparsePattern.random(shape, 0.1, block_size=block_size)
    count = int(0.3 * pattern.nnz)
    ranks = CountingRanks(RANKS)
    pairs = [(torch.randn(8, shape[1]), torch.randn(8, shape[0]))]
    way = "pieces" if samples > 8 else None  # for few samples these are sent
    topk_over_ranks(ranks, [GrowthWanted("layer", pairs, pattern, count)], exchange=way)
    first, last = chunk_of(ranks, pattern.nnz)
    slots = torch.arange(first, last)
    (chosen,) = select_over_ranks(ranks, [torch.rand(len(slots))], [slots], [count], largest=False)
    joined(ranks, [slots[chosen]], [pattern.nnz])
    told = traffic([Matrix(*shape, 1, block_size)], 0.1, RANKS, samples=samples)
    # The others bring what this rank brings, so scores are equal and ties cost six rounds more.
    ties = 2 * 6 * ring(2048 * 8, RANKS)
    assert ranks.sent == pytest.approx(told.update + ties, rel=0.01)


def test_a_step_sends_what_the_formula_says():
    values = torch.zeros(100_000)
    ranks = CountingRanks(RANKS)
    ranks.sum(values)
    told = traffic([Matrix(1000, 1000)], 0.1, RANKS, samples=1)
    assert ranks.sent == pytest.approx(told.step, rel=0.01)
    assert told.dense == pytest.approx(10 * told.step)
    assert told.less(10**9) == pytest.approx(10, rel=1e-3)


WAYS = {
    "a pair": {"0": Placement("x", None, None, False), "2": Placement(None, "x", "x", True)},
    "both axes": {"0": Placement("x", "y", None, False), "2": Placement("y", "x", "x", True)},
    "gathered": {"0": Placement("x", "y", None, False), "2": Placement("x", "y", "x", True)},
}


@pytest.mark.parametrize("way", WAYS)
def test_rectangles_send_and_hold_what_the_plan_says(way):
    full = ds.SparsePattern.full
    model = nn.Sequential(
        ds.nn.SparseLinear(512, 1024, pattern=full((1024, 512))),
        nn.ReLU(),
        ds.nn.SparseLinear(1024, 512, pattern=full((512, 1024))),
    )
    grid, batch, placements = Grid(8, 8, 16), 256, WAYS[way]
    layers, chains = find_chains(model)
    search = Search(layers, chains, batch, 2, Cluster())
    costs = [
        search._layer(name, position, search.borders[0], placements[name], grid)
        for position, name in enumerate(("0", "2"))
    ]
    cost = costs[0] + costs[1]
    one = Candidate(grid, cost, placements, 1.0, True)
    lines = RankGrid(*map(CountingRanks, grid), everyone=CountingRanks(RANKS))
    split(model, lines, Plan(one, [one], chains, batch, Cluster()))
    before = [line.sent for line in (lines.x, lines.y, lines.z)]
    x = torch.randn(batch // 16, 512, requires_grad=True)
    model(x).sum().backward()
    for layer in layers.values():
        lines.z.sum(layer.values.grad)
    sent = sum(line.sent for line in (lines.x, lines.y, lines.z)) - sum(before)
    assert sent == pytest.approx(cost.traffic, rel=0.01)
    optimizer = torch.optim.Adam([layer.values for layer in layers.values()])
    optimizer.step()
    tensors = [t for layer in layers.values() for t in (layer.values, layer.values.grad)]
    tensors += [s for state in optimizer.state.values() for s in state.values() if s.dim()]
    index = 12 * sum(layer.pattern.nnz for layer in layers.values())
    activations = batch // 16 * sum(sum(_features(layer)) for layer in layers.values()) * 4
    assert cost.memory == pytest.approx(
        sum(t.nbytes for t in tensors) + index + activations, rel=0.01
    )


def _features(layer):
    return layer.in_features, layer.out_features


def test_where_sharding_a_sparse_layer_does_not_pay():
    # Single elements under FSDP2 on 64 ranks: their index is whole on each, and dense is smaller.
    one = held(0.1, 64)
    assert one.sharded > 1.5 * one.dense
    assert held(0.1, 64, block_size=16).sharded < one.dense / 7
    assert one.rectangles < one.dense / 4
    few = held(0.1, 8)
    assert 0.25 < few.sharded / few.dense < 0.35
