"""The partitioner on the plans of the numbered cases (families A to D, F, G, I): host side only.

Buckets are as the planner sizes them; with forced spills everything travels, exactly.
"""

import itertools

import numpy as np
import pytest
import torch

from dynsparse.pattern import SparsePattern
from popsparse.encoding.meta_info import read_buckets
from popsparse.encoding.partitioner import Partitioner
from popsparse.machine.target import Target
from popsparse.planning.params import FullyConnectedParams, SparsityParams

ALL = {"do_grad_a_pass": True, "do_grad_w_pass": True}
SPILLS = {"force_bucket_spills": True}
# name: out, in, batch, density, block, dtype, options
CASES = {}
for dtype, partials in (("float16", "float32"), ("float16", "float16"), ("float32", "float32")):
    for block in (4, 8, 16):
        name = f"{dtype}-{partials}-block{block}"
        options = {**ALL, **SPILLS, "partials_type": partials}
        for move in (False, True):
            fixed = {"exchange": {"grad_w_exchange_buckets": move}}
            CASES[f"A-{name}-move{move}"] = (
                1024, 1024, 4, 0.1, block, dtype, {**options, "plan_constraints": fixed},
            )  # fmt: skip
        CASES[f"B-{name}"] = (1024, 1024, 8, 0.1, block, dtype, options)
        CASES[f"C-{name}"] = (256, 256, 64, 0.01, block, dtype, options)
for dtype, (name, passes) in itertools.product(
    ("float16", "float32"),
    (
        ("fwd", {}),
        ("bwd", {"do_grad_a_pass": True, "shared_buckets": False}),
        ("bwd-shared", {"do_grad_a_pass": True}),
        ("wu", {"do_grad_w_pass": True, "shared_buckets": False}),
    ),
):
    CASES[f"D-{dtype}-{name}"] = (512, 512, 4, 0.1, 1, dtype, {**SPILLS, **passes})
CASES["G"] = (512, 512, 64, 0.01, 1, "float16",
              {"plan_constraints": {"partition": {"x": 6, "y": 4, "z": 1}}})  # fmt: skip
CASES["I-65"] = (1080, 1024, 4, 0.1, 1, "float16",
                 {**ALL, "meta_info_bucket_oversize_proportion": 0.005})  # fmt: skip
CASES["I-66"] = (544, 512, 16, 0.1, 16, "float16",
                 {**ALL, "meta_info_bucket_oversize_proportion": 0.2})  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_round_trip(case):
    rows, cols, batch, density, block, dtype, options = case
    params = FullyConnectedParams.create_with_nz_ratio(
        SparsityParams(block), density, batch, 1, cols, rows
    )
    partitioner = Partitioner.for_params(Target.mk2(tiles=24), dtype, params, options)
    generator = torch.Generator().manual_seed(0)
    pattern = SparsePattern.random((rows, cols), density, block_size=block, generator=generator)
    values = torch.randn(pattern.values_shape, generator=generator).to(getattr(torch, dtype))
    encoded = partitioner.encode(pattern, values)
    found, found_values = partitioner.decode(encoded)
    assert found == pattern
    assert torch.equal(found_values, values)
    layout = partitioner.layout
    if options.get("force_bucket_spills"):
        assert encoded.info.spilled * layout.area == values.numel()
    contents = read_buckets(encoded.meta_info[layout.overflow_words :], layout)
    home = contents.bucket // layout.partition[2]
    parts_x, parts_y, _ = layout.partition
    met = np.zeros(len(home), int)
    for i, j in [(0, 0), *encoded.info.overflow.kept_offsets]:
        at = (home // parts_y + i) % parts_x * parts_y + (home % parts_y + j) % parts_y
        met += at == contents.rectangle
    assert (met == 1).all()


def test_imbalanced_area_spills_and_propagates():
    """Family F: 1024 x 1024, with the area (384, 128) to (400, 786) eight times as dense."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.ones(1024, 1024)
    weight[384:400, 128:786] = 8
    chance = weight * (0.1 * 1024 * 1024 / weight.sum())
    pattern = SparsePattern.from_mask(torch.rand(chance.shape, generator=generator) < chance)
    params = FullyConnectedParams.create_with_nz_ratio(SparsityParams(1), 0.1, 8, 1, 1024, 1024)
    for dtype in ("float16", "float32"):
        partitioner = Partitioner.for_params(
            Target.mk2(tiles=24), dtype, params, {"do_grad_a_pass": True}
        )
        encoded = partitioner.encode(pattern, torch.ones(pattern.nnz))
        assert partitioner.decode(encoded)[0] == pattern


@pytest.mark.parametrize("block", [1, 16])
def test_worst_case_all_nonzeros_in_one_partition(block):
    """As many nonzeros as planned, all of one (x, y), fill the preceding buckets in order."""
    params = FullyConnectedParams.create_with_nz_ratio(
        SparsityParams(block), 0.02, 16, 1, 1024, 1024
    )
    fixed = {"plan_constraints": {"partition": {"x": 4, "y": 3, "z": 2}}}
    partitioner = Partitioner.for_params(Target.mk2(tiles=24), "float16", params, fixed)
    layout = partitioner.layout
    parts_x, parts_y, parts_z = layout.partition
    part_x, part_y, _ = layout.part
    count = min(int(0.02 * 1024 * 1024) // layout.area, part_x * part_y)
    corner = SparsePattern.random((part_x, part_y), nnz=count, generator=torch.manual_seed(0))
    pattern = SparsePattern(corner.rows, corner.cols, shape=(1024, 1024), block_size=block)
    values = torch.randn(pattern.values_shape).half()
    encoded = partitioner.encode(pattern, values)
    found, found_values = partitioner.decode(encoded)
    assert found == pattern
    assert torch.equal(found_values, values)
    # From (0, 0) backwards in the host's order: the same x first, then the last x, and so on.
    held = (encoded.info.nz_used.reshape(parts_x, -1) > 0).any(1)
    offsets = sum(parts_y - (i == 0) for i in range(parts_x) if held[-i % parts_x])
    assert encoded.info.propagated > pattern.nnz / 2
    assert encoded.info.propagation_steps == parts_z * offsets
    assert offsets > parts_y
