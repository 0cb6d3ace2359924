"""Family O: block-sparse products of PopSparse's experimental API, with all its partitions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from popsparse import block_sparse
from popsparse.machine import Engine, Graph, Sequence, Target

METHODS = ("block", "block-naive", "strip", "stripv0", "block-group2")
TOLERANCE = {"float16": 0.1, "float32": 0.001}

# kind, dtype, block, rows of the left operand, groups, transposed
KINDS = {
    "dsd float": ("dense_sparse", "float32", 8, 64, 1, False),
    "dds float": ("dense_dense", "float32", 8, 64, 1, False),
    "dsd half": ("dense_sparse", "float16", 16, 64, 1, False),
    "dsd half transposed": ("dense_sparse", "float16", 16, 64, 1, True),
    "dsd float groups transposed": ("dense_sparse", "float32", 8, 16, 2, True),
}
CASES = {f"{kind}-{method}": (kind, method) for kind, method in itertools.product(KINDS, METHODS)}


def mask_of(groups, seed=0):
    """12 of 8 x 8 blocks in each group."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((groups, 64), bool)
    for one in mask:
        one[rng.permutation(64)[:12]] = True
    return mask.reshape(groups, 8, 8)


def dense_of(blocks, mask, height, width):
    """[groups, rows, cols] in float64 of blocks [nnz, area]."""
    groups, rows, cols = mask.shape
    found = np.zeros((groups, rows, cols, height, width))
    found[mask] = blocks.reshape(-1, height, width)
    return found.transpose(0, 1, 3, 2, 4).reshape(groups, rows * height, cols * width)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_family_o(case):
    name, method = case
    kind, dtype, b, rows, groups, transposed = KINDS[name]
    mask, size = mask_of(groups), 8 * b
    if kind == "dense_sparse":
        params = block_sparse.MatmulParams.create_dense_sparse(
            (rows, size, size), (b, b, b), mask, transposed, dtype=dtype, num_groups=groups
        )
    else:
        params = block_sparse.MatmulParams.create_dense_dense(
            (rows, size, size), (b, b, b), mask, dtype=dtype
        )
    options = {"partition_method": method}
    target = Target.mk2(tiles=16)
    graph, program = Graph(target), Sequence()
    lhs = block_sparse.create_matmul_lhs(graph, params, options)
    rhs = block_sparse.create_matmul_rhs(graph, params, options)
    out = block_sparse.matmul(graph, params, program, lhs, rhs, options)
    for handle, tensor in (("lhs", lhs), ("rhs", rhs), ("out", out)):
        graph.add_handle(handle, tensor)
    rng = np.random.default_rng(1)
    left = rng.uniform(-1, 1, lhs.shape).astype(dtype)
    right = rng.uniform(-1, 1, rhs.shape).astype(dtype)
    engine = Engine(graph, program)
    engine.write("lhs", left)
    engine.write("rhs", right)
    profile = engine.run()
    a = left.astype(np.float64).reshape(groups, rows, size)
    if kind == "dense_sparse":
        second = dense_of(right, mask, b, b)
        wanted = a @ (second.transpose(0, 2, 1) if transposed else second)
        wanted = wanted.reshape(groups * rows, size)
    else:
        full = a @ right.astype(np.float64).reshape(groups, size, size)
        grid = full.reshape(groups, rows // b, b, 8, b).transpose(0, 1, 3, 2, 4)
        wanted = grid[mask].reshape(-1, b * b)
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(engine.read("out"), wanted, rtol=tolerance, atol=tolerance)

    plan = block_sparse.plan(params, target, options)
    products = params.nnz * params.grid[0 if params.kind == "dense_sparse" else 1]
    assert plan.pieces.loads(16).sum() == products
    assert 1 <= plan.tiles_used <= 16
    assert profile.cycles > 0
    assert 0 < profile.memory.max_tile_bytes < target.bytes_per_tile


def test_float32_data_with_float16_partials_fails_as_expected():
    with pytest.raises(ValueError, match="float32 operands need float32 partial sums"):
        block_sparse.MatmulParams.create_dense_sparse(
            (64, 64, 64), (8, 8, 8), mask_of(1), dtype="float32", partials_type="float16"
        )
