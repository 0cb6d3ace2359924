"""Properties of the cycle formulas that their golden values do not show."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from popsparse.planning import cycles as tile_cycles
from popsparse.planning import cycles as vertex_cycles
from popsparse.planning.params import FLOAT16, FLOAT32

TYPES = st.sampled_from([FLOAT16, FLOAT32])
ELEMENT = [
    vertex_cycles.element_forward,
    vertex_cycles.element_grad_input,
    vertex_cycles.element_transposed,
    vertex_cycles.element_grad_weight,
]


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(ELEMENT),
    TYPES,
    st.lists(
        st.tuples(st.integers(1, 99), st.integers(1, 99), st.integers(1, 70)),
        min_size=1,
        max_size=9,
    ),
)
def test_arrays_are_the_scalars_side_by_side(formula, dtype, cases):
    x, y, z = np.array(cases).T
    together = formula(x, y, z, dtype, 6)
    assert together.tolist() == [int(formula(*case, dtype, 6)) for case in cases]


@settings(deadline=None, max_examples=40)
@given(TYPES, st.lists(st.integers(1, 5000), min_size=1, max_size=9), st.integers(2, 40))
def test_tile_formulas_take_arrays(dtype, counts, depth):
    for formula in (
        lambda n: tile_cycles.reduce(n, depth, dtype, FLOAT16, 6),
        lambda n: tile_cycles.cast(n, FLOAT32, dtype, 6),
        lambda n: tile_cycles.gather(n, dtype, 6),
        lambda n: tile_cycles.transpose_blocks(n, 8, 8, dtype, 6),
    ):
        assert formula(np.array(counts)).tolist() == [int(formula(n)) for n in counts]


@pytest.mark.parametrize(
    ("block", "half", "single"),
    [((4, 4), 4, 4), ((2, 2), 4, 4), ((4, 8), 8, 8), ((16, 16), 16, 8), ((32, 32), 16, 8)],
)
def test_kernel_that_holds_a_block(block, half, single):
    assert vertex_cycles.kernel_edge(block, FLOAT16) == half
    assert vertex_cycles.kernel_edge(block, FLOAT32) == single
