"""The functions that launch the block kernels, in Triton's interpreter, equal float64."""

import pytest
import torch
from cases import DTYPES, LAYOUTS, Case, error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynsparse import SparsePattern
from dynsparse.ops.linear import LayerIndex
from dynsparse.ops.linear.cuda import blocks
from dynsparse.ops.linear.cuda.configurations import BLOCKS, Gradient

pytestmark = pytest.mark.usefixtures("interpreter")


def check_case(case):
    y = blocks.forward(case.x, case.values, case.p, case.bias)
    dx, dw = blocks.backward(case.dy, case.x, case.values, case.p, True, True)
    assert error(y, case.y) < case.limit
    assert error(dx, case.dx) < case.limit
    assert error(dw, case.dw) < case.limit
    assert (y.dtype, dx.dtype, dw.dtype) == (case.x.dtype, case.x.dtype, case.values.dtype)
    assert (y.shape, dx.shape, dw.shape) == (case.dy.shape, case.x.shape, case.values.shape)
    assert y.is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("b", BLOCKS)
def test_every_block_dtype_and_layout(b, dtype, layout):
    check_case(Case(b, (3, 4), 70, dtype, layout=layout, without=1))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("b", BLOCKS)
def test_16_bit_values(b, dtype):
    check_case(Case(b, (2, 3), 40, dtype, values=dtype))


@pytest.mark.parametrize("batch", [1, 2, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("b", [16, 64])
def test_ragged_batches(b, batch):
    check_case(Case(b, (2, 3), batch, torch.float32))


@pytest.mark.parametrize("density", [0.0, 0.07, 1.0])
@pytest.mark.parametrize("b", BLOCKS)
def test_empty_nearly_empty_and_full_patterns(b, density):
    case = Case(b, (3, 5), 20, torch.float32, density)
    y = blocks.forward(case.x, case.values, case.p, case.bias)
    dx, dw = blocks.backward(case.dy, case.x, case.values, case.p, True, True)
    for got, wanted in ((y, case.y), (dx, case.dx), (dw, case.dw)):
        torch.testing.assert_close(got, wanted.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("b", BLOCKS)
def test_no_samples(b):
    case = Case(b, (2, 3), 0, torch.bfloat16)
    y = blocks.forward(case.x, case.values, case.p, case.bias)
    dx, dw = blocks.backward(case.dy, case.x, case.values, case.p, True, True)
    assert (y.shape, dx.shape) == ((0, 2 * b), (0, 3 * b))
    assert dw.shape == case.values.shape
    assert not dw.any()


@pytest.mark.parametrize("grid", [(1, 1), (1, 6), (6, 1), (1, 9), (9, 1)])
@pytest.mark.parametrize("b", [16, 32])
def test_rows_with_a_partial_last_step(b, grid):
    check_case(Case(b, grid, 33, torch.float32, density=0.99))


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_needed_gradients(needs):
    case = Case(16, (2, 3), 20, torch.float32)
    dx, dw = blocks.backward(case.dy, case.x, case.values, case.p, *needs)
    assert (dx is not None, dw is not None) == needs
    assert dx is None or error(dx, case.dx) < case.limit
    assert dw is None or error(dw, case.dw) < case.limit


@pytest.mark.parametrize("dtype", [None, *DTYPES], ids=str)
def test_biases(dtype):
    case = Case(32, (2, 3), 20, torch.bfloat16)
    bias = None if dtype is None else case.bias.to(dtype)
    y = blocks.forward(case.x, case.values, case.p, bias)
    wanted = case.y - case.bias.double() + (0 if bias is None else bias.double())
    assert error(y, wanted) < case.limit


def test_biases_with_strides():
    case = Case(32, (2, 3), 20, torch.float32)
    for bias in (torch.randn(128)[::2], torch.randn(1).expand(64)):
        y = blocks.forward(case.x, case.values, case.p, bias)
        assert error(y, case.y - case.bias.double() + bias.double()) < case.limit


@pytest.mark.parametrize("b", [16, 32, 64])
def test_infinity_and_nan_stay_in_their_rows(b):
    case = Case(b, (6, 5), 70, torch.float32, density=0.3)
    # Column 0 stands in for the blocks that are not there.
    case.x[3, 0] = float("inf")
    case.x[4, 1] = float("nan")
    y = blocks.forward(case.x, case.values, case.p, case.bias).view(70, 6, b)
    taken = set(case.pattern.rows[case.pattern.cols == 0].tolist())
    assert taken
    assert len(taken) < 6
    touched = torch.zeros(70, 6, dtype=torch.bool)
    touched[3:5, list(taken)] = True
    assert torch.equal(y.isfinite().all(2), ~touched)


@pytest.mark.parametrize("b", [16, 128])
def test_operands_at_unaligned_addresses(b):
    case = Case(b, (2, 3), 20, torch.float32)

    def moved(tensor):
        odd = torch.empty(tensor.numel() + 1)[1:]
        return odd.copy_(tensor.reshape(-1)).view(tensor.shape)

    y = blocks.forward(moved(case.x), moved(case.values), case.p, moved(case.bias))
    dx, dw = blocks.backward(moved(case.dy), moved(case.x), moved(case.values), case.p, True, True)
    assert error(y, case.y) < case.limit
    assert error(dx, case.dx) < case.limit
    assert error(dw, case.dw) < case.limit


def test_float32_values_get_float32_gradients():
    case = Case(32, (2, 3), 50, torch.bfloat16)
    _, dw = blocks.backward(case.dy, case.x, case.values, case.p, False, True)
    assert error(dw, case.dw) < 1e-6


def test_results_are_deterministic():
    case = Case(16, (4, 5), 300, torch.bfloat16)
    first = blocks.forward(case.x, case.values, case.p, case.bias)
    dx, dw = blocks.backward(case.dy, case.x, case.values, case.p, True, True)
    again = blocks.backward(case.dy, case.x, case.values, case.p, True, True)
    assert torch.equal(first, blocks.forward(case.x, case.values, case.p, case.bias))
    assert torch.equal(dx, again[0])
    assert torch.equal(dw, again[1])


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([16, 16, 32, 64]),
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(0, 80),
    st.floats(0, 1),
    st.sampled_from(DTYPES),
    st.sampled_from(LAYOUTS),
    st.integers(0, 4),
)
def test_any_layer(b, height, width, batch, density, dtype, layout, without):
    case = Case(b, (height, width), batch, dtype, density, layout, without=without)
    y = blocks.forward(case.x, case.values, case.p, case.bias)
    dx, dw = blocks.backward(case.dy, case.x, case.values, case.p, True, True)
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for got, wanted in ((y, case.y), (dx, case.dx), (dw, case.dw)):
        scale = float(wanted.abs().max()) if wanted.numel() else 0.0
        torch.testing.assert_close(
            got.double(), wanted, rtol=rounding, atol=rounding * max(1.0, scale)
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("b", BLOCKS)
def test_bias_gradient_with_grad_weight(b, dtype, layout):
    """For every row, also one without blocks; rows that the kernel does not write are NaN here."""
    case = Case(b, (3, 4), 70, dtype, layout=layout, without=1)
    sums = []
    _, dw = blocks.backward(case.dy, case.x, case.values, case.p, False, True, sums=sums)
    assert error(dw, case.dw) < case.limit
    assert sums[0].dtype is torch.float32
    assert error(sums[0], case.dy.double().sum(0)) < 1e-5


@pytest.mark.parametrize(("density", "batch"), [(0.0, 9), (1.0, 1), (0.3, 300)])
def test_bias_gradient_of_other_patterns_and_batches(density, batch):
    case = Case(16, (9, 7), batch, torch.bfloat16, density)
    for split in (1, 2):
        sums = []
        config = Gradient(8, 64, 4, 4, split)
        launch = blocks._launch()
        launch.grad_weight(case.dy, case.x, case.p, torch.float32, config, sums)
        assert error(sums[0], case.dy.double().sum(0)) < 1e-5


def test_float32_bias_gradient_uses_torch():
    case = Case(16, (2, 3), 9, torch.float32)
    sums = []
    blocks.backward(case.dy, case.x, case.values, case.p, False, True, sums=sums)
    assert sums == []
    none = Case(16, (2, 3), 0, torch.bfloat16)
    blocks.backward(none.dy, none.x, none.values, none.p, False, True, sums=sums)
    assert sums == []


def test_aligned_operands_are_not_copied():
    x = torch.randn(64, 48).bfloat16()
    for lies in (x, x.t(), x[::2], x[:, 16:], x[:, :7], x[:1], x[:0], x[5:6, 8:9]):
        assert blocks.ensure_aligned(lies) is lies


def test_unaligned_operands_are_copied():
    x, wide = torch.randn(64, 48).bfloat16(), torch.randn(64, 49).bfloat16()
    expanded = x[:1].expand(64, 48), x[:1, :1].expand(64, 48)
    for odd in (wide[:, :48], wide.t()[:48], x[:, 1:17], x[:, ::2], x.view(-1)[1:97].view(2, 48)):
        made = blocks.ensure_aligned(odd)
        assert torch.equal(made, odd)
        assert made.is_contiguous()
        assert made.data_ptr() % 16 == 0
        assert made.data_ptr() != odd.data_ptr()
    for odd in expanded:
        made = blocks.ensure_aligned(odd)
        assert torch.equal(made, odd)
        assert made.stride() == (48, 1)


@pytest.mark.parametrize("b", BLOCKS)
def test_passes_reuse_data_derived_from_the_index(monkeypatch, b):
    """The first pass may run in a CUDA graph's memory pool, where nothing may be cached."""
    monkeypatch.setattr(blocks, "runs_triton", lambda device: True)
    for dtype in DTYPES:
        case = Case(b, (2, 3), 20, dtype)
        blocks.derive(case.p)
        before = dict(case.p._derived)
        assert before
        blocks.forward(case.x, case.values, case.p, case.bias)
        blocks.backward(case.dy, case.x, case.values, case.p, True, True)
        assert case.p._derived == before


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("b", BLOCKS)
def test_values_in_slots_of_any_order(b, dtype):
    case = Case(b, (3, 5), 70, dtype, without=1)
    order = torch.randperm(case.pattern.nnz)
    other = SparsePattern._from_slots(case.pattern.flat[order], case.pattern)
    values = case.values[order]
    p = LayerIndex(other.index, values)
    y = blocks.forward(case.x, values, p, case.bias)
    dx, dw = blocks.backward(case.dy, case.x, values, p, True, True)
    assert error(y, case.y) < case.limit
    assert error(dx, case.dx) < case.limit
    assert error(dw, case.dw[order]) < case.limit
