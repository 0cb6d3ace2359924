"""Family K of the conformance cases: 12 round trips of plans with dense weights."""

import itertools

import numpy as np
import pytest
import torch

from dynsparse.pattern import SparsePattern
from popsparse.encoding.partitioner import Partitioner
from popsparse.machine.target import Target
from popsparse.planning.params import FullyConnectedParams, SparsityParams
from popsparse.planning.search import make_plan
from popsparse.programs.dense_weights import DensePartitioner

CASES = list(itertools.product((1, 4, 8), (24, 64), (40, 80)))


def dense_plan(block, cols, rows, groups=1):
    params = FullyConnectedParams.create_with_nz_ratio(
        SparsityParams(block), 0.1, 8, groups, cols, rows
    )
    return make_plan(
        Target.mk2(tiles=32), "float32", params, {"plan_constraints": {"use_dense": True}}
    )


@pytest.mark.parametrize(
    ("block", "cols", "rows"), CASES, ids=[f"K-block{b}-y{y}-x{x}" for b, y, x in CASES]
)
def test_round_trip(block, cols, rows):
    generator = torch.Generator().manual_seed(block * rows + cols)
    pattern = SparsePattern.random((rows, cols), 0.1, block_size=block, generator=generator)
    values = torch.rand(pattern.values_shape, generator=generator) + 0.5
    partitioner = DensePartitioner(dense_plan(block, cols, rows))
    encoded = partitioner.encode(pattern, values)
    # [in][out], as the dense product takes its weights.
    assert torch.equal(
        torch.from_numpy(encoded.nz_values).reshape(cols, rows), pattern.to_dense(values).T
    )
    assert encoded.meta_info.size == 0
    found, found_values = partitioner.decode(encoded)
    assert found == pattern
    assert torch.equal(found_values, values)
    assert np.array_equal(encoded.pattern.gather(encoded.nz_values), values)


def test_groups():
    partitioner = DensePartitioner(dense_plan(1, 24, 40, groups=2))
    patterns = [SparsePattern.random((40, 24), 0.1) for _ in range(2)]
    encoded = partitioner.encode(patterns, [torch.ones(p.nnz) for p in patterns])
    assert [pattern for pattern, _ in partitioner.decode(encoded)] == patterns


def test_errors():
    plan = dense_plan(4, 24, 40)
    with pytest.raises(ValueError, match="a plan with use_dense has no buckets"):
        Partitioner(plan)
    partitioner = DensePartitioner(plan)
    with pytest.raises(ValueError, match=r"expected a pattern of the shape \(40, 24\)"):
        partitioner.encode(SparsePattern([0], [0], shape=(40, 24)), torch.ones(1))
    with pytest.raises(ValueError, match=r"nz_values must have the shape \[960\], got \[5\]"):
        partitioner.decode(None, torch.ones(5))
