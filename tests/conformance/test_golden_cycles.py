"""The golden cycle values of the planner's vertex formulas (reference, section 3.7)."""

import pytest

from popsparse.machine.dtypes import FLOAT, HALF
from popsparse.planning import cycles as dense
from popsparse.planning import cycles as tile
from popsparse.planning import cycles as vertex


@pytest.mark.parametrize(
    ("formula", "cycles"),
    [
        (vertex.element_forward, 2541),
        (vertex.element_grad_input, 2528),
        (vertex.element_transposed, 2002),
        (vertex.element_grad_weight, 3611),
    ],
    ids=["forward", "grad_input", "transposed", "grad_weight"],
)
def test_element_half_z8(formula, cycles):
    assert formula(5, 20, 8, HALF, 6) == cycles


def test_element_forward_float_z4():
    assert vertex.element_forward(5, 20, 4, FLOAT, 6) == 2463


@pytest.mark.parametrize(
    ("block", "dtype", "partials", "units", "many", "single"),
    [
        (16, HALF, HALF, 16, 20578, 854),
        (4, HALF, FLOAT, 8, 11152, 608),
        (8, FLOAT, FLOAT, 16, 33114, 1218),
    ],
    ids=["16x16-half-half", "4x4-half-float", "8x8-float"],
)
def test_block_forward(block, dtype, partials, units, many, single):
    sizes = ((block, block), dtype, partials, units, 6)
    assert vertex.block_forward(5, 7, 16, *sizes, buckets=2) == many
    assert vertex.block_forward(1, 1, 16, *sizes) == single


def test_block_grad_weight_amp():
    found = vertex.block_grad_weight_amp(5, 7, 32, (16, 16), HALF, HALF, 6)
    assert found == 16711


def test_block_grad_weight():
    assert vertex.block_grad_weight(5, 7, 16, (8, 8), HALF, FLOAT, 6) == 104897


@pytest.mark.parametrize(("result", "cycles"), [(FLOAT, 4728), (HALF, 2712)])
def test_reduce_1000_by_4(result, cycles):
    partials, out = (FLOAT, HALF) if result is FLOAT else (HALF, HALF)
    assert tile.reduce(1000, 4, partials, out, 6) == cycles


def test_cast_1000():
    assert tile.cast(1000, FLOAT, HALF, 6) == 660


@pytest.mark.parametrize(("edge", "cycles"), [(4, 397), (8, 2449), (16, 5473)])
def test_transpose_50_half_blocks(edge, cycles):
    assert tile.transpose_blocks(50, edge, edge, HALF, 6) == cycles


def test_rearrange_batch():
    assert tile.rearrange_batch(10, 16, 32, HALF, 6) == 2538
    assert tile.rearrange_batch(10, 8, 32, FLOAT, 6) == 2706


AMP_GOLDEN = [
    # field, half->half 16 units, float 16 units
    (1, 12353, 18287),
    (4, 12353, 18287),
    (16, 14945, 18917),
    (64, 23009, 37871),
    (256, 59873, 116207),
    (342, 76673, 151151),
]


@pytest.mark.parametrize(("field", "half", "single"), AMP_GOLDEN)
def test_dense_amp(field, half, single):
    sizes = (field, 16, 3)
    by_half = dense.AMP(16, 16, 16), HALF, HALF
    by_single = dense.AMP(16, 8, 16), FLOAT, FLOAT
    assert dense.amp(*sizes, *by_half, 6, 8) == half
    assert dense.amp(*sizes, *by_single, 6, 8) == single
    assert dense.amp(*sizes, *by_half, 6, 16) == half - 1536
    assert dense.amp(*sizes, *by_single, 6, 16) == single - 1536


@pytest.mark.parametrize(
    ("dtype", "partials", "cycles"),
    [
        (HALF, HALF, (4810, 10642, 33970)),
        (HALF, FLOAT, (4020, 9204, 29940)),
        (FLOAT, FLOAT, (7173, 17397, 58293)),
    ],
)
def test_dense_hmac(dtype, partials, cycles):
    kind = dense.HMAC(256, 2 if partials is HALF else 1)
    found = [
        int(dense.hmac(field, 2, 3, kind, dtype, partials, 6, zeroing=False))
        for field in (4, 16, 64)
    ]
    assert tuple(found) == cycles


@pytest.mark.parametrize(("dtype", "joined", "split"), [(HALF, 2361, 3264), (FLOAT, 4377, 6144)])
def test_dense_reduce_768_by_8(dtype, joined, split):
    # A tile so small that the partials do not fit together takes the slower way.
    assert dense.reduce_stage(768, 8, dtype, dtype, 6, 638976) == joined
    assert dense.reduce_stage(768, 8, dtype, dtype, 6, 16384) == split


@pytest.mark.parametrize(
    ("depth", "left"),
    [(1, ()), (15, ()), (16, (4,)), (22, (5,)), (64, (8,)), (124, (11,)), (125, (25, 5)),
     (500, (63, 8))],
)  # fmt: skip
def test_dense_reduction_depths(depth, left):
    assert dense.reduction_depths(depth) == left


def test_dense_cast_1000():
    assert tile.cast(1000, HALF, FLOAT, 6) == 660
    assert tile.cast(1000, HALF, HALF, 6) == 408
