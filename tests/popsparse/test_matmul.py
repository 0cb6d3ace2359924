"""The sparse x dense product: both transposes, several groups, odd sizes."""

import numpy as np
import pytest
import torch

from dynsparse.pattern import SparsePattern
from popsparse.encoding.partitioner import Partitioner
from popsparse.machine import Engine, Graph, Sequence, Target
from popsparse.planning.params import MatmulParams, SparsityParams
from popsparse.products import (
    create_sparse_dense_matmul_lhs,
    create_sparse_dense_matmul_rhs,
    sparse_dense_matmul,
)

TOLERANCE = {"float16": 5e-3, "float32": 1e-5}


@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["rhs", "rhs-transposed"])
@pytest.mark.parametrize("transpose_lhs", [False, True], ids=["lhs", "lhs-transposed"])
@pytest.mark.parametrize(("block", "dtype"), [(1, "float32"), (8, "float16")])
def test_product_of_two_groups(block, dtype, transpose_lhs, transpose_rhs):
    groups, m, k, n = 2, 40, 24, 13
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
    encoded = Partitioner(lhs.plan).encode(patterns, values)
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
