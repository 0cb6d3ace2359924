"""Reduction of partial sums of static products: placement, cycles, exchange code."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynsparse.pattern import SparsePattern
from popsparse import static
from popsparse.machine import Target
from popsparse.machine.dtypes import FLOAT, HALF
from popsparse.measure import run_plans
from popsparse.planning.static_layout import vertex_cycles
from popsparse.static_timing import code_bytes, exchange_code


def plan_of(size, block, density, n, dtype="float16", tiles=1472, **options):
    generator = torch.Generator().manual_seed(0)
    pattern = SparsePattern.random((size, size), density, block_size=block, generator=generator)
    return static.plan(pattern, n, dtype, Target.bow(tiles=tiles), options=options)


def test_vertices_by_hand():
    """Strided: 15, and 13 + depth for each four halves (10 + depth for each two floats). A width of
    three floats: 57 and 4 of checks, 11 + 19 per partial for no pair of vectors; then the last two,
    9 + 16, and one, 7 + 16."""
    assert vertex_cycles(16, 5, HALF) == 15 + 4 * (13 + 5)
    assert vertex_cycles(8, 2, FLOAT) == 15 + 4 * (10 + 2)
    assert vertex_cycles(3, 5, FLOAT) == 61 + (9 + 16 * 5) + (7 + 16 * 5)
    assert vertex_cycles(12, 3, HALF) == 63 + (15 + 19 * 3) + (13 + 16 * 3)


def test_few_outputs_are_reduced_in_place_and_many_are_spread():
    """8 columns of elements: 2 partial vectors a partial sum at home, and no second exchange. A
    row of 16-blocks with 4,096 outputs: 1,024 vectors a partial sum, or two."""
    few = plan_of(512, 1, 0.1, 64, n_split=8, num_bands=4).sums
    assert few.at_home.all()
    assert not len(few.spread)
    many = plan_of(512, 16, 0.5, 512, n_split=2, num_bands=4)
    assert not many.sums.at_home[many.sums.depth > 1].any()
    # Four vectors each.
    assert set(many.sums.length[many.sums.depth > 1]) == {16}


@settings(deadline=None, max_examples=40)
@given(
    block=st.sampled_from([1, 4, 8, 16]),
    size=st.integers(1, 12),
    n=st.integers(1, 90),
    density=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    dtype=st.sampled_from(["float16", "float32"]),
    tiles=st.sampled_from([1, 2, 12, 40]),
)
def test_every_output_is_computed_once(block, size, n, density, dtype, tiles):
    plan = plan_of(size * block, block, density, n, dtype, tiles)
    sums, outputs = plan.sums, plan.outputs
    made = np.zeros(plan.params.m * plan.n_padded, int)
    for begin, length in zip(sums.begin, sums.length, strict=True):
        made[begin : begin + length] += 1
    for one in sums.ones:
        made[outputs.begin[one] : outputs.begin[one] + outputs.length[one]] += 1
    assert (made == 1).all()
    assert (np.diff(sums.tile) >= 0).all()
    assert not len(sums.tile) or (sums.tile.min() >= 0 and sums.tile.max() < tiles)
    assert (sums.depth != 1).all()
    assert (plan.depths[sums.row, sums.part] == sums.depth).all()
    # What is made elsewhere comes home.
    away = sums.length[~sums.at_home].sum()
    assert away == outputs.length[sums.spread].sum()


@pytest.mark.parametrize(
    ("size", "block", "density", "n"),
    [(1024, 1, 0.1, 64), (1024, 8, 0.25, 128), (512, 16, 0.5, 512)],
)
def test_exchange_code_is_close_to_the_machine(size, block, density, n):
    plan = plan_of(size, block, density, n)
    profile = run_plans({"forward": plan}, ignore_data=True)["forward"].profile
    found = profile.memory.by_category
    assert exchange_code(plan).max() == pytest.approx(found["exchange code"].max(), rel=0.1)
    code = code_bytes(plan)
    assert code["control code"] == found["control code"].max()
    assert code["stacks"] == found["stacks"].max()
    assert code["vertex code"] == found["vertex code"].max()
    low, typical, high = (sum(code_bytes(plan, end).values()) for end in ("low", "typical", "high"))
    assert low < typical < high


def test_memory_of_a_product_without_sums():
    """On one tile every output is a single sum, so nothing is reduced."""
    plan = plan_of(16, 1, 0.5, 4, tiles=1)
    assert not len(plan.sums.tile)
    assert static.tile_memory(plan).needed > 0
