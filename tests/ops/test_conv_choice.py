"""Cost estimates of sparse and dense convolutions, and the choice between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynsparse._core import native
from dynsparse.ops.conv import choice
from dynsparse.ops.conv.choice import KINDS, cheapest_kind
from dynsparse.ops.conv.geometry import Geometry
from dynsparse.ops.linear.cost_table import Layer


@pytest.mark.parametrize(
    ("batch", "height", "width", "groups", "strip"),
    [
        (32, 8, 16, 2, 8),  # an image a lane
        (8, 8, 16, 1, 4),  # half an image
        (1, 56, 16, 1, 4),  # 14 strips of 4 rows, two lanes idle
        (3, 5, 4, 1, 5),  # three images; 6 strips of 3 rows take 2 groups, 6 rows
        (1, 1, 16, 1, 1),  # one lane of sixteen
        (17, 1, 16, 2, 1),
    ],
)
def test_images_are_split_as_in_the_kernels(batch, height, width, groups, strip):
    assert choice._count_streams(batch, height, width) == (groups, strip)


def test_terms_by_hand():
    # 2 inputs, 4 outputs, 3x3 at a stride of 2, 6 blocks of 1; 8 images of 5x5 -> 3x3.
    layer, g = Layer(4, 18, 6, 1), Geometry((3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 1)
    at = (layer, g, 8, (3, 3))
    elements, places = 4 * 18, 8 * 9
    expected = (1, 6, elements, elements * places, places * (2 * 4 + 4))
    assert choice.terms("dense", *at, False, 8) == expected
    # One group of 8 images: the input as packed is 7x7, the output 3x3.
    run = 1 + 1.5 / 3
    assert choice.terms("sparse", *at, False, 8) == (1, 6, 2 * 49 + 4 * 9, 6 * 9 * run)
    # Four phases: each packs the output of 3x3 for taps that reach over 2x2.
    packed = 4 * (4 * 4 * 4 + 2 * 2 * 9)
    assert choice.terms("sparse", *at, True, 8) == (1, 6, packed, 6 * 9 * run)


@pytest.mark.skipif(native.load() is None, reason="the compiled kernels are not built")
def test_vector_width_of_the_instruction_set():
    widths = {"v2": 4, "v3": 8, "v4": 16, "neon": 4}
    for isa in native.describe()["available"]:
        with native.use_isa(isa):
            assert choice.vector_width() == widths[isa]


@given(
    st.integers(1, 64), st.integers(1, 64), st.sampled_from([1, 3]), st.integers(1, 2),
    st.sampled_from([1, 4, 16]), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40),
    st.booleans(),
)  # fmt: skip
def test_choice_switches_to_dense_once_with_density(
    out, channels, kernel, stride, block, batch, height, width, backward
):
    g = Geometry((kernel, kernel), (stride, stride), (1, 1, 1, 1), (1, 1), 1)
    inputs = channels * block * kernel**2
    total = out * channels * kernel**2
    chosen = [
        cheapest_kind(
            Layer(out * block, inputs, nnz, block), g, batch, (height, width), backward, 16
        )
        for nnz in range(1, total + 1, max(1, total // 8))
    ]
    assert set(chosen) <= set(KINDS)
    assert chosen == sorted(chosen, reverse=True)  # "sparse" first
