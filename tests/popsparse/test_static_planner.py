"""The static planner: hand-computed formulas, bands and tiles, brute force, errors, report."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynsparse.pattern import SparsePattern
from popsparse import static
from popsparse.machine import Engine, Graph, Sequence, Target
from popsparse.machine.dtypes import FLOAT, HALF
from popsparse.planning import static as static_cycles
from popsparse.planning.static_layout import (
    Interval,
    column_bands,
    sort_kept_first,
    split_n,
    split_tiles,
    tiles_of_bands,
)


def random_pattern(rows, columns, density, block=1, seed=0):
    return SparsePattern.random(
        (rows, columns),
        density=density,
        block_size=block,
        generator=torch.Generator().manual_seed(seed),
    )


def test_element_cycles():
    # Two rows of 5 elements in all: 31 + 2 x 7 + (5 - 2) x 2.
    assert static_cycles.element_product(2, 5, 4, HALF) == 51
    # One row of 3, n = 20: 33 + 11 + 2 x (14 + 3 x 2) + 9 + 2 x 2.
    assert static_cycles.element_product(1, 3, 20, HALF) == 97
    # Two rows of 3, n = 6: 31 + 2 x (12 + (10 + 3 x 2) + (10 + 2 x 2)).
    assert static_cycles.element_product(2, 6, 6, FLOAT) == 115


def test_block_cycles():
    # 24 columns are 4 a worker: 30 + 13 x 6 + 2 x (6 + 17) + 3 x (16 + 64 + (19 + 4 x 3) x 6).
    assert static_cycles.block_product(2, 3, 24, 16, HALF, 6) == 952
    # A 4 x 4 float32 block, one column a worker: 30 + 13 x 6 + (6 + 17) + 16 + 8 + 12 x 6.
    assert static_cycles.block_product(1, 1, 6, 4, FLOAT, 6) == 227


def test_reduce_and_zero_cycles():
    # 100 results of depth 3, 17 a worker in 3 vectors: 6 x (16 + 3 x (6 + 2 + 8)).
    assert static_cycles.reduce(18, 54, HALF, 6) == 384
    # 2 x 8 x 10 floats are 80 words, 14 a worker: 6 x (12 + 14).
    assert static_cycles.zero(2, 10, 8, FLOAT, 6) == 156
    assert static_cycles.zero(2, 10, 8, HALF, 6) == 0
    assert static_cycles.zero(2, 10, 4, FLOAT, 6) == 0


def test_bands_and_tiles():
    bands = column_bands(np.array([2, 0, 3, 1, 0]), 2)
    assert bands.bounds.tolist() == [0, 3, 5]
    assert bands.blocks == (5, 1)
    assert bands.widest == 2
    # 5 of 6 blocks: 6 of 8 tiles, the rest to the last band.
    assert tiles_of_bands(bands.blocks, 8, 2) == (6, 2)
    assert tiles_of_bands((1, 1, 1), 4, 2) is None
    parts = split_n(20, 3, 4)
    assert parts == [Interval(0, 8), Interval(8, 16), Interval(16, 20)]
    assert split_tiles(parts, 12, 2) == [Interval(0, 4), Interval(4, 8), Interval(8, 12)]


def test_nearly_empty_rows_form_a_separate_band():
    order, kept = sort_kept_first(np.array([10, 0, 1, 10]), True)
    assert order.tolist() == [0, 2, 3, 1]
    assert kept == 3
    assert sort_kept_first(np.array([10, 0, 1, 10]), False)[1] == 4


def test_predicted_time_by_hand():
    """A full 4 x 4 float32 matrix on 2 tiles, n = 2, without splits: two rows per tile."""
    target = Target(tiles=2, sync_cycles=126, local_copy_cycles=5)
    options = {"num_bands": 1, "n_split": 1}
    plan = static.plan(SparsePattern.full((4, 4)), 2, "float32", target, options=options)
    time = static.predict(plan)
    # Four columns of 8 bytes in one stretch, common to both tiles: 32 / 8 cycles.
    # A row a worker: 6 x (29 + 5 + 3 x 2). The 16 bytes of output of each tile: 4 cycles.
    assert [(s.name, s.compute, s.exchange) for s in time.steps] == [
        ("gather operands", 5, 4),
        ("multiply", 240, 0),
        ("exchange partials", 5, 4),
    ]
    # The vertices belong to the superstep of the exchange before them.
    assert time.cycles == 248 + 2 * 126 + 2 * 5
    assert time.products == 2 * 16 * 2


@settings(deadline=None, max_examples=15)
@given(
    block=st.sampled_from([1, 4, 8, 16]),
    dtype=st.sampled_from(["float16", "float32"]),
    rows=st.integers(2, 20),
    columns=st.integers(2, 20),
    n=st.integers(1, 40),
    density=st.sampled_from([0.1, 0.5, 1.0]),
    tiles=st.sampled_from([2, 8, 12]),
)
def test_plan_is_optimal(block, dtype, rows, columns, n, density, tiles):
    pattern = random_pattern(rows * block, columns * block, density, block)
    if not pattern.nnz:
        return
    target = Target(tiles=tiles)
    best = static.plan(pattern, n, dtype, target)
    others = []
    for split in range(1, tiles // 2 + 1):
        for bands in range(1, tiles // 2 // split + 1):
            try:
                options = {"n_split": split, "num_bands": bands}
                others.append(static.plan(pattern, n, dtype, target, options=options).cycles)
            except ValueError:
                continue
    # A constraint may ask for more bands than a free search tries.
    grain = 1 if block == 1 else 4 if dtype == "float16" else 2
    if best.planned[1] // grain >= tiles // 2:
        assert best.cycles == min(others)
    assert best.cycles >= min(others)


@settings(deadline=None, max_examples=30)
@given(
    block=st.sampled_from([1, 4]),
    rows=st.integers(1, 20),
    columns=st.integers(1, 20),
    n=st.integers(1, 40),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    tiles=st.sampled_from([1, 2, 3, 12, 40]),
)
def test_every_block_has_one_tile_in_each_part(block, rows, columns, n, density, tiles):
    pattern = random_pattern(rows * block, columns * block, density, block)
    plan = static.plan(pattern, n, "float16", Target(tiles=tiles))
    assert sorted(plan.order.tolist()) == list(range(pattern.nnz))
    assert plan.n_parts[0].begin == 0
    assert all(a.end == b.begin for a, b in zip(plan.n_parts, plan.n_parts[1:], strict=False))
    assert 0 <= plan.n_padded - n < 4
    for part, where in enumerate(plan.tile_parts):
        pieces = plan.pieces(part)
        assert pieces.blocks.sum() == pattern.nnz
        assert len(np.unique(pieces.tile)) == len(pieces)
        assert not len(pieces) or pieces.tile.max() < where.size <= tiles
        for band, count in enumerate(plan.bands.blocks):
            # Inside a band every tile has the same number, the last perhaps fewer.
            held = pieces.blocks[pieces.band == band]
            assert held.sum() == count
            assert len(set(held[:-1].tolist())) <= 1


def test_memory_is_close_to_the_machine():
    target = Target.mk2(tiles=24)
    pattern = random_pattern(512, 512, 0.1, 8)
    graph, program = Graph(target), Sequence()
    params = static.MatmulParams.create_for_sparse_dense(1, 512, 512, 64)
    sparse = static.create_sparse_dense_matmul_lhs(graph, "float16", params, pattern)
    dense = static.create_sparse_dense_matmul_rhs(graph, "float16", params, pattern)
    static.sparse_dense_matmul(graph, sparse, dense, program)
    found = Engine(graph, program, numerics=False).memory_use.data_bytes.max()
    memory = static.tile_memory(sparse.plan)
    assert found == pytest.approx(memory.needed - memory.code, rel=0.2)


def test_report():
    plan = static.plan(random_pattern(256, 256, 0.1), 64, "float16", Target.mk2(tiles=24))
    report = static.plan_report(plan)
    assert json.loads(json.dumps(report)) == report
    assert sum(report["terms"].values()) == report["cycles"] == plan.cycles
    text = static.plan_text(plan)
    assert "sparse 256 x 256 times dense 256 x 64" in text
    assert "Runners-up" in text
    assert f"{plan.cycles:,} cycles" in text
    empty = static.plan(random_pattern(8, 8, 0.0), 4, target=Target(tiles=2))
    assert "Static plan" in static.plan_text(empty)


def test_cache_distinguishes_patterns_and_dtypes():
    target, cache = Target(tiles=4), static.PlanningCache()
    params = static.MatmulParams.create_for_sparse_dense(1, 16, 16, 4)
    first, second = (random_pattern(16, 16, 0.2, seed=seed) for seed in (0, 1))
    plan = static.make_plan(target, "float16", params, first, cache=cache)
    assert static.make_plan(target, "float16", params, first, cache=cache) is plan
    assert static.make_plan(target, "float16", params, second, cache=cache) is not plan
    assert static.make_plan(target, "float32", params, first, cache=cache) is not plan
    assert (len(cache), cache.hits) == (3, 1)


PATTERN = random_pattern(16, 16, 0.2)
PARAMS = static.MatmulParams.create_for_sparse_dense(1, 16, 16, 8)
TARGET = Target(tiles=4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: static.plan(PATTERN, 8, options={"n_split": 3}, target=TARGET),
            "n_split must be at most 2, got 3",
        ),
        (
            lambda: static.plan(PATTERN, 8, options={"num_bands": 9}, target=TARGET),
            "num_bands must be at most 2, got 9",
        ),
        (
            lambda: static.plan(
                PATTERN, 16, options={"n_split": 2, "num_bands": 2}, target=Target(tiles=6)
            ),
            "n_split=2 and num_bands=2 leave parts without any of the 6 tiles",
        ),
        (
            lambda: static.plan(PATTERN, 24, options={"n_split": 3}, target=Target(tiles=8)),
            "n_split=3 and num_bands=0 leave parts without any of the 8 tiles",
        ),
    ],
)
def test_bad_plans(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bad_types():
    with pytest.raises(TypeError, match="SparsePattern"):
        static.make_plan(TARGET, "float16", PARAMS, np.zeros((16, 16)))
    with pytest.raises(TypeError, match="SparsePattern"):
        static.plan([[1, 0]], 4, target=TARGET)


def test_bad_operands():
    graph, program = Graph(TARGET), Sequence()
    sparse = static.create_sparse_dense_matmul_lhs(graph, "float16", PARAMS, PATTERN)
    dense = static.create_sparse_dense_matmul_rhs(graph, "float16", PARAMS, PATTERN)
    with pytest.raises(ValueError, match="create_for_dense_sparse"):
        static.dense_sparse_matmul(graph, dense, sparse, program)
    with pytest.raises(ValueError, match=r"shape \[1, 16, 8\], got \[1, 8, 16\]"):
        static.sparse_dense_matmul(graph, sparse, dense, program, transpose_rhs=True)
    with pytest.raises(TypeError, match="must be a Tensor"):
        static.sparse_dense_matmul(graph, sparse, np.zeros((1, 16, 8)), program)


def test_bad_values():
    partitioner = static.Partitioner(PARAMS, "float32", TARGET, PATTERN)
    with pytest.raises(ValueError, match="no values"):
        partitioner.encode(PATTERN)
    with pytest.raises(ValueError, match="must have the shape"):
        partitioner.encode(PATTERN, np.ones(PATTERN.nnz - 1))
