"""Chains of layers, and the mesh dimensions that each layer is sharded over."""

from __future__ import annotations

from itertools import pairwise

import pytest
from grids import on_grid
from torch import nn

import dynsparse as ds
from dynsparse.distributed.placement import Borders, find_chains, place_layers
from dynsparse.ranks import Placement


def test_find_chains():
    model = nn.Sequential(
        ds.nn.SparseLinear(8, 8),
        nn.GELU(),
        nn.Dropout(0.1),
        ds.nn.SparseLinear(8, 6),
        nn.LayerNorm(6),
        ds.nn.SparseLinear(6, 8),
        ds.nn.SparseTransformerLayer(8, 2, 16),
    )
    _, chains = find_chains(model)
    found = [[bundle.names for bundle in chain] for chain in chains]
    assert found[0] == [("0",), ("3",)]
    assert found[1] == [("5",)]
    assert found[2] == [tuple(f"6.attention.{p}_proj" for p in "qkv"), ("6.attention.out_proj",)]
    assert found[3] == [("6.linear1",), ("6.linear2",)]
    assert chains[2][0].unit == 4  # heads stay whole


def placements_on(sizes, model):
    layers, (chain,) = find_chains(model)
    found = on_grid(sizes, lambda grid: place_layers(chain, Borders(layers, chain), grid))
    first = found[0, 0, 0]
    assert all(one == first for one in found.values())
    return first


def mlp(*sizes, block_size=1):
    rows = []
    for a, b in pairwise(sizes):
        rows += [ds.nn.SparseLinear(a, b, 0.5, block_size), nn.ReLU()]
    return nn.Sequential(*rows)


def test_chain_alternates_row_and_column_shards():
    model = mlp(16, 32, 16, 8)
    assert placements_on((2, 2, 1), model) == {
        "0": Placement("x", "y", None, gather_output=False),
        "2": Placement("y", "x", "x", gather_output=False),
        "4": Placement("x", "y", "y", gather_output=True),
    }
    assert placements_on((2, 1, 2), model) == {
        "0": Placement("x", None, None, gather_output=False),
        "2": Placement(None, "x", "x", gather_output=False),
        "4": Placement("x", None, None, gather_output=True),
    }


@pytest.mark.parametrize("sizes", [(4, 1, 1), (1, 4, 1)])
def test_blocks_are_not_split(sizes):
    whole = Placement()
    assert placements_on(sizes, mlp(32, 32, block_size=16)) == {"0": whole}
    found = placements_on((4, 1, 1), mlp(64, 64, 32, block_size=16))
    assert found["2"] == Placement(
        None, "x", "x", gather_output=True
    )  # two block rows, four of columns
    found = placements_on((4, 1, 1), mlp(64, 32, 64, block_size=16))
    assert found == {"0": Placement(gather_output=False), "2": whole}


def test_attention_heads_are_not_split():
    attention = ds.nn.SparseMultiheadAttention(24, 3, density=0.5)
    assert set(placements_on((4, 1, 1), attention).values()) == {
        Placement(gather_output=False),
        Placement(),
    }
    assert placements_on((2, 1, 1), attention)["v_proj"].rows == "x"
