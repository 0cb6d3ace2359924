"""Growth scores of blocks computed by the kernel, in Triton's interpreter, equal float64."""

import pytest
import torch
from cases import DTYPES, LAYOUTS, activations, error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynsparse import SparsePattern
from dynsparse.ops.grow import on_device
from dynsparse.ops.grow.naive import topk_outside_naive
from dynsparse.ops.grow.on_device import BLOCKS, block_scores

pytestmark = pytest.mark.usefixtures("interpreter")

POOLINGS = ("sum", "avg", "max")


def expected_scores(pairs, b, pooling):
    dense = sum(dy.double().t() @ x.double() for x, dy in pairs).abs()
    blocks = dense.unflatten(0, (-1, b)).unflatten(2, (-1, b))
    if pooling == "max":
        return blocks.amax((1, 3))
    return blocks.mean((1, 3)) if pooling == "avg" else blocks.sum((1, 3))


def random_pair(batch, width, height, dtype=torch.float32, layout="contiguous"):
    return activations(batch, width, dtype, layout), activations(batch, height, dtype, layout)


def check_scores(pairs, b, pooling="sum", limit=1e-6):
    scores = block_scores(pairs, b, pooling)
    expected = expected_scores(pairs, b, pooling)
    assert scores.dtype == torch.float32
    assert scores.shape == expected.shape
    assert error(scores, expected) < limit


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("b", BLOCKS)
def test_every_block_dtype_and_pooling(b, dtype, pooling):
    check_scores([random_pair(70, 3 * b, 2 * b, dtype)], b, pooling)


@pytest.mark.parametrize("b", [4, 16])
@pytest.mark.parametrize("sides", [(1, 1), (1, 9), (9, 1), (35, 10)])
def test_partial_tiles(sides, b):
    check_scores([random_pair(20, sides[0] * b, sides[1] * b)], b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("many", [2, 3, 7])
def test_pairs_are_summed_before_magnitudes(many, dtype):
    check_scores([random_pair(10 * i + 5, 64, 96, dtype) for i in range(many)], 16)


def test_pairs_that_cancel():
    x, dy = (tensor.round() for tensor in random_pair(30, 64, 64))  # sums of integers are exact
    assert not block_scores([(x, dy), (x, -dy)], 16).any()


def test_pairs_with_different_layouts():
    check_scores([random_pair(20, 64, 96, layout=layout) for layout in LAYOUTS], 16)


def test_pairs_at_unaligned_addresses():
    check_scores([(x[3:], dy[3:]) for x, dy in (random_pair(20, 36, 20) for _ in range(3))], 4)


def test_pairs_of_mixed_types():
    check_scores([random_pair(20, 64, 64, dtype) for dtype in DTYPES], 16)


def test_no_samples():
    assert not block_scores([random_pair(0, 64, 64)], 16).any()


def test_results_are_deterministic():
    pairs = [random_pair(100, 128, 256), random_pair(50, 128, 256)]
    assert torch.equal(block_scores(pairs, 16), block_scores(pairs, 16))


def test_no_dense_matrix_is_allocated(largest_tensor):
    pairs = [random_pair(4, 512, 512), random_pair(3, 512, 512)]
    with largest_tensor:
        block_scores(pairs, 32)
    # Those of a micro-batch; a matrix has 128 times as many.
    assert 0 < largest_tensor.bytes <= 4 * 4 * 512


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("panel_bytes", [1 << 20, 4 * 5 * 2])
def test_growth_uses_the_kernel(monkeypatch, pooling, panel_bytes):
    asked = []
    monkeypatch.setattr(on_device, "PANEL_BYTES", panel_bytes)
    monkeypatch.setattr(on_device, "runs_triton", lambda device: asked.append(1) or True)
    pattern = SparsePattern.random((7 * 16, 5 * 16), 0.3, block_size=16)
    pairs = [random_pair(20, 80, 112), random_pair(31, 80, 112)]
    found, scores = on_device.topk_on_device([pairs], [pattern], 9, pooling, torch.float32)
    expected, wanted_scores = topk_outside_naive(pairs, pattern, 9, pooling=pooling)
    order = expected.sort().indices
    assert asked
    assert torch.equal(found[0], expected[order])
    torch.testing.assert_close(scores[0], wanted_scores[order])


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(BLOCKS),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(0, 70), min_size=1, max_size=3),
    st.sampled_from(DTYPES),
    st.sampled_from(LAYOUTS),
    st.sampled_from(POOLINGS),
)
def test_any_pairs(b, height, width, batches, dtype, layout, pooling):
    pairs = [random_pair(batch, width * b, height * b, dtype, layout) for batch in batches]
    check_scores(pairs, b, pooling, limit=1e-5)
