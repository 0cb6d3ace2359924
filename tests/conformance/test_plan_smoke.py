"""Plans of large layers (reference, family Q) and of the numbered cases' shapes."""

import pytest

from popsparse.machine.target import Target
from popsparse.planning.params import FullyConnectedParams, SparsityParams
from popsparse.planning.search import make_plan

ALL = {"do_grad_a_pass": True, "do_grad_w_pass": True}
MK1 = Target(tiles=1216, bytes_per_tile=256 * 1024)


def check(plan):
    assert plan.tiles_used <= plan.target.tiles
    per_tile = plan.groups_per_tile
    for dim in "xyz":
        parts = getattr(plan.partition, dim)
        groups = -(-getattr(plan.sizes, dim) // getattr(plan.grouping, dim))
        # Every part holds something, and all of them together everything.
        assert (parts - 1) * getattr(per_tile, dim) < groups <= parts * getattr(per_tile, dim)
    if plan.memory_bound is not None:
        assert plan.temporary_bytes <= plan.memory_bound
    area = plan.block_dimensions[0] * plan.block_dimensions[1]
    values = plan.params.nz_ratio * plan.params.num_elements
    assert plan.tiles_used * plan.buckets.nz_elements >= values - area


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("in_", "out"), [(1024, 32768), (32768, 32768)])
@pytest.mark.parametrize("batch", [4, 8])
def test_large_element(dtype, in_, out, batch):
    params = FullyConnectedParams(SparsityParams(), 0.01, batch, 1, in_, out)
    check(make_plan(MK1, dtype, params, ALL))


@pytest.mark.parametrize(
    ("edge", "dtype", "batch"), [(4, "float32", 1), (4, "float32", 512), (16, "float16", 1)]
)
def test_large_block(edge, dtype, batch):
    params = FullyConnectedParams(SparsityParams(edge), 0.01, batch, 1, 32768, 32768)
    check(make_plan(MK1, dtype, params, ALL))


SHAPES = [
    # in, out, batch, density, block, tiles, options
    *[(1024, 1024, b, 0.1, e, 24, {}) for b in (4, 8) for e in (4, 8, 16)],
    *[(256, 256, 64, 0.01, e, 24, {}) for e in (4, 8, 16)],
    (512, 512, 4, 0.1, 1, 24, {"shared_buckets": False}),
    (512, 512, 4, 0.1, 1, 24, {}),
    (784, 300, 16, 0.1, 1, 1472, {"meta_info_bucket_oversize_proportion": 0.5}),
    (1024, 1024, 8, 0.1, 1, 1472, {}),
    (47, 128, 4, 0.3, 1, 24, {"plan_constraints": {"use_dense": True}}),
    (1024, 1080, 4, 0.1, 1, 24, {"meta_info_bucket_oversize_proportion": 0.005}),
    (512, 544, 16, 0.1, 16, 24, {"meta_info_bucket_oversize_proportion": 0.2}),
    (65, 126, 4, 0.2, 1, 16, {"meta_info_bucket_oversize_proportion": 0.5}),
    (24, 120, 4, 0.1, (8, 4), 32, {"meta_info_bucket_oversize_proportion": 0.6}),
    (24, 120, 4, 0.1, (4, 2), 32, {"meta_info_bucket_oversize_proportion": 0.6}),
]


@pytest.mark.parametrize("partials", ["float16", "float32"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("move_buckets", [False, True])
@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda s: f"in{s[0]}-out{s[1]}-batch{s[2]}-d{s[3]}-block{s[4]}-t{s[5]}"
)
def test_conformance_shapes(shape, dtype, partials, move_buckets):
    in_, out, batch, density, block, tiles, options = shape
    params = FullyConnectedParams(SparsityParams(block), density, batch, 1, in_, out)
    exchange = {"exchange": {"grad_w_exchange_buckets": move_buckets}}
    constraints = {**options.get("plan_constraints", {}), **exchange}
    asked = {**ALL, "partials_type": partials, **options, "plan_constraints": constraints}
    plan = make_plan(Target(tiles=tiles), dtype, params, asked)
    check(plan)
    assert plan.grad_w_exchange_buckets is move_buckets
    assert plan.use_dense is constraints.get("use_dense", False)
    assert plan.options.partials_type.size >= plan.dtype.size
