"""The sparse x dense product: both transposes, groups, odd sizes, bad input."""

import numpy as np
import pytest
import torch

from dynsparse.pattern import SparsePattern
from popsparse.encoding.partitioner import Partitioner
from popsparse.machine import Engine, Graph, Sequence, Target
from popsparse.planning.params import FullyConnectedParams, MatmulParams, SparsityParams
from popsparse.products import (
    create_fully_connected_weights,
    create_sparse_dense_matmul_lhs,
    create_sparse_dense_matmul_rhs,
    sparse_dense_matmul,
)

TOLERANCE = {"float16": 5e-3, "float32": 1e-5}


@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["rhs", "rhs-transposed"])
@pytest.mark.parametrize("transpose_lhs", [False, True], ids=["lhs", "lhs-transposed"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("block", "dtype"), [(1, "float32"), (1, "float16"), (8, "float16")])
def test_product(block, dtype, groups, transpose_lhs, transpose_rhs):
    m, k, n = 40, 24, 13
    params = MatmulParams.create_with_nz_ratio(SparsityParams(block), 0.4, groups, m, k, n)
    graph, program = Graph(Target.mk2(tiles=12)), Sequence()
    lhs = create_sparse_dense_matmul_lhs(graph, dtype, params)
    rows = m if transpose_lhs else k
    if not transpose_lhs and not transpose_rhs:
        rhs = create_sparse_dense_matmul_rhs(graph, dtype, params)
    else:
        shape = [groups, n, rows] if transpose_rhs else [groups, rows, n]
        rhs = graph.add_variable(dtype, shape, "rhs", tiles=3)
    out = sparse_dense_matmul(graph, lhs, rhs, program, transpose_lhs, transpose_rhs)
    for name, tensor in (("w", lhs.meta_info), ("v", lhs.nz_values), ("b", rhs), ("c", out)):
        graph.add_handle(name, tensor)
    engine = Engine(graph, program)
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    patterns = [
        SparsePattern.random((m, k), 0.4, block_size=block, generator=generator)
        for _ in range(groups)
    ]
    values = [torch.randn(p.values_shape, generator=generator).to(kind) for p in patterns]
    partitioner = Partitioner(lhs.plan)
    encoded = (
        partitioner.encode(patterns[0], values[0])
        if groups == 1
        else partitioner.encode(patterns, values)
    )
    b = torch.randn(rhs.shape, generator=generator).to(kind)
    engine.write("w", encoded.meta_info)
    engine.write("v", encoded.nz_values)
    engine.write("b", b)
    engine.run()
    dense = torch.stack([p.to_dense(v) for p, v in zip(patterns, values, strict=True)]).double()
    left = dense.mT if transpose_lhs else dense
    wanted = left @ (b.mT if transpose_rhs else b).double()
    found = engine.read("c")
    assert found.shape == (groups, k if transpose_lhs else m, n)
    scale = float(wanted.abs().max())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE[dtype] * scale)


def test_bad_input():
    params = MatmulParams.create_with_nz_ratio(SparsityParams(1), 0.4, 1, 16, 8, 4)
    graph, program = Graph(Target.mk2(tiles=4)), Sequence()
    lhs = create_sparse_dense_matmul_lhs(graph, "float32", params)
    rhs = create_sparse_dense_matmul_rhs(graph, "float32", params)
    with pytest.raises(TypeError, match="lhs must be a SparseTensor"):
        sparse_dense_matmul(graph, rhs, rhs, program)
    with pytest.raises(ValueError, match=r"rhs must be \[1, 16, 4\], got \[1, 8, 4\]"):
        sparse_dense_matmul(graph, lhs, rhs, program, transpose_lhs=True)
    with pytest.raises(ValueError, match=r"rhs must be \[1, 4, 8\], got \[1, 8, 4\]"):
        sparse_dense_matmul(graph, lhs, rhs, program, transpose_rhs=True)
    with pytest.raises(ValueError, match="lhs was made with"):
        sparse_dense_matmul(graph, lhs, rhs, program, options={"shared_buckets": False})
    with pytest.raises(ValueError, match="unknown option 'shared_bucket'"):
        sparse_dense_matmul(graph, lhs, rhs, program, options={"shared_bucket": False})
    layer = FullyConnectedParams.create_with_nz_ratio(SparsityParams(1), 0.4, 4, 1, 8, 16)
    weights = create_fully_connected_weights(graph, "float32", layer)
    with pytest.raises(ValueError, match="create_sparse_dense_matmul_lhs"):
        sparse_dense_matmul(graph, weights, rhs, program)
