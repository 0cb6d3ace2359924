"""Look-ups in a sparse table equal those in the dense table, in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from product_checks import shuffle_slots
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import embedding as dense_embedding

from dynsparse import SparsePattern
from dynsparse.ops import capture
from dynsparse.ops.embedding import embedding, products


def table(b=1, height=6, width=4, density=0.4, seed=0):
    g = torch.Generator().manual_seed(seed)
    pattern = SparsePattern.random((height * b, width * b), density, block_size=b, generator=g)
    pattern = shuffle_slots(pattern, g)
    values = torch.randn(pattern.values_shape, generator=g, dtype=torch.float64)
    return pattern, values.requires_grad_()


@given(
    st.sampled_from([1, 2, 4]),
    st.integers(1, 8),
    st.integers(1, 5),
    st.floats(0, 1),
    st.lists(st.integers(0, 4), max_size=3),
)
def test_rows_and_gradient(b, height, width, density, lead):
    pattern, values = table(b, height, width, density)
    ids = torch.randint(height * b, lead)
    rows = embedding(ids, values, pattern, width * b)
    dense = pattern.to_dense(values.detach()).requires_grad_()
    expected = dense_embedding(ids, dense)
    assert rows.shape == (*lead, width * b)
    assert torch.equal(rows, expected)
    dy = torch.randn_like(rows)
    rows.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(values.grad, pattern.values_of(dense.grad))


@pytest.mark.parametrize("b", [1, 2])
def test_gradcheck_and_opcheck(b):
    pattern, values = table(b)
    ids = torch.tensor([[0, 3], [3, 5 * b]])
    width = pattern.shape[1]
    torch.autograd.gradcheck(lambda v: embedding(ids, v, pattern, width), values)
    index = pattern.index
    args = (ids, values, index.row_ptr, index.cols, index.slots, width)
    torch.library.opcheck(torch.ops.dynsparse.embedding.default, args)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_ids_of_any_integer_type(dtype):
    pattern, values = table()
    ids = torch.tensor([5, 0], dtype=dtype)
    rows = embedding(ids, values, pattern.index, 4)
    assert torch.equal(rows, pattern.to_dense(values)[[5, 0]])


def test_captured_pair_gives_the_dense_gradient():
    pattern, values = table()
    kept = capture.start(pattern.row_ptr, values)
    ids = torch.tensor([1, 4, 1])
    dy = torch.randn(3, 4, dtype=torch.float64)
    embedding(ids, values, pattern, 4).backward(dy)
    assert len(kept) == 1
    ((x, one_hot),) = kept
    expected = torch.zeros(6, 4, dtype=torch.float64).index_add_(0, ids, dy)
    torch.testing.assert_close(one_hot.t() @ x, expected)
    assert x.shape == (2, 4)  # one row for each token met


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.tensor([0.5]), TypeError, "ids must be integers, got torch.float32"),
        (torch.tensor([True]), TypeError, "ids must be integers, got torch.bool"),
        (torch.tensor([6]), IndexError, r"ids must lie in \[0, 6\), got 6"),
        (torch.tensor([2, -1]), IndexError, r"ids must lie in \[0, 6\), got -1"),
    ],
)
def test_bad_ids(ids, error, message):
    pattern, values = table()
    with pytest.raises(error, match=message):
        embedding(ids, values, pattern, 4)


def test_second_derivative_raises():
    pattern, values = table()
    rows = embedding(torch.tensor([0, 1, 2]), values, pattern, 4)
    (grad,) = torch.autograd.grad(rows.square().sum(), values, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*densify first"):
        grad.sum().backward()


@given(st.sampled_from([1, 2, 4]), st.integers(1, 8), st.integers(1, 5), st.floats(0, 1))
def test_on_a_device(b, height, width, density):
    """Results are checked on CPU tensors."""
    pattern, values = table(b, height, width, density)
    index, values = pattern.index, values.detach()
    ids = torch.randint(height * b, (7,))
    dense = pattern.to_dense(values).requires_grad_()
    rows = products.forward_on_device(
        ids, values, index.row_ptr, index.cols, index.slots, width * b
    )
    expected = dense_embedding(ids, dense)
    assert torch.equal(rows, expected)
    dy = torch.randn_like(rows)
    expected.backward(dy)
    gradient = products.grad_weight_on_device(
        dy, ids, values, index.row_ptr, index.cols, index.slots
    )
    torch.testing.assert_close(gradient, pattern.values_of(dense.grad))
    x, one_hot = products.pair_on_device(dy, ids, height * b)
    torch.testing.assert_close(one_hot.t() @ x, dense.grad)


def test_no_host_waits():
    pattern, _ = table(2)
    sizes = [len(pattern.row_ptr), pattern.nnz, 0]
    with FakeTensorMode():
        index = [torch.empty(n, dtype=torch.int32, device="cuda") for n in sizes]
        values = torch.empty(pattern.values_shape, device="cuda")
        ids = torch.empty(3, 5, dtype=torch.int64, device="cuda")
        rows = products.forward_on_device(ids, values, *index, 8)
        assert rows.shape == (3, 5, 8)
        dy, ids = rows.view(-1, 8), ids.view(-1)
        assert products.grad_weight_on_device(dy, ids, values, *index).shape == values.shape
        assert [t.shape for t in products.pair_on_device(dy, ids, 12)] == [(15, 8), (15, 12)]
