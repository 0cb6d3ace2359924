"""Block-sparse products and softmax equal dense ones."""

from __future__ import annotations

import pytest
import torch
from against_dense import KINDS, patterns, same
from hypothesis import given, settings
from hypothesis import strategies as st

from dynsparse import SparsePattern
from dynsparse.ops import block_sparse
from dynsparse.ops.block_sparse import naive
from dynsparse.ops.block_sparse.products import SUBBLOCK_MASKS

BATCHES = [(), (1,), (3,), (2, 3)]


def drawn(*shape: int, seed: int = 0, strided: bool = False) -> torch.Tensor:
    """Make float64 tensors; `strided` ones have the last two dimensions transposed, with gaps."""
    generator = torch.Generator().manual_seed(seed)
    if not strided:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)
    *batch, rows, cols = shape
    wide = torch.randn(*batch, cols, rows + 3, generator=generator, dtype=torch.float64)
    return wide[..., 2 : rows + 2].mT


def leaves(*tensors: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    return [t.to(dtype).requires_grad_() for t in tensors]


@settings(max_examples=40, deadline=None)
@given(
    patterns(), st.sampled_from(BATCHES), st.integers(1, 20), st.booleans(), st.booleans(), KINDS
)
def test_products_equal_dense(pattern, batch, n, shared, strided, dtype):
    (m, k), own = pattern.shape, () if shared else batch
    values = drawn(*own, *pattern.values_shape)
    right, left = drawn(*batch, k, n, strided=strided), drawn(*batch, n, m, strided=strided)

    ours, d = leaves(values, right, dtype=dtype)
    oracle, e = leaves(ours.detach(), d.detach(), dtype=torch.float64)
    found = block_sparse.sparse_dense_matmul(ours, pattern, d)
    same(found, naive.dense_of(oracle, pattern) @ e, (ours, d), (oracle, e), dtype)

    ours, d = leaves(values, left, dtype=dtype)
    oracle, e = leaves(ours.detach(), d.detach(), dtype=torch.float64)
    found = block_sparse.dense_sparse_matmul(d, ours, pattern)
    same(found, e @ naive.dense_of(oracle, pattern), (ours, d), (oracle, e), dtype)

    a, b = leaves(
        drawn(*batch, m, n, seed=1, strided=strided), drawn(*batch, n, k, seed=2), dtype=dtype
    )
    c, d = leaves(a.detach(), b.detach(), dtype=torch.float64)
    full = c @ d
    wanted = torch.stack([pattern.values_of(one) for one in full.reshape(-1, m, k)])
    wanted = wanted.reshape(*batch, *pattern.values_shape)
    same(block_sparse.sampled_matmul(a, b, pattern), wanted, (a, b), (c, d), dtype)


@settings(max_examples=40, deadline=None)
@given(patterns(), st.sampled_from(BATCHES), st.sampled_from(SUBBLOCK_MASKS), KINDS)
def test_softmax_equals_dense(pattern, batch, mask, dtype):
    (ours,) = leaves(3 * drawn(*batch, *pattern.values_shape), dtype=dtype)
    (oracle,) = leaves(ours.detach(), dtype=torch.float64)
    found = block_sparse.softmax(ours, pattern, mask)
    same(found, naive.softmax(oracle, pattern, mask), (ours,), (oracle,), dtype)


def test_softmax_by_hand():
    pattern = SparsePattern([0, 0, 1], [0, 1, 1], shape=(4, 4), block_size=2)
    values = torch.tensor(
        [[[0.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [5.0, 2.0]], [[7.0, 1.0], [0.0, 0.0]]]
    )
    found = naive.dense_of(block_sparse.softmax(values, pattern), pattern)
    e = torch.e
    rows = [[1 / 4] * 4, [w / (1 + e + e**5 + e**2) for w in (1, e, e**5, e**2)]]
    rows += [[0, 0, e**7 / (e**7 + e), e / (e**7 + e)], [0, 0, 1 / 2, 1 / 2]]
    torch.testing.assert_close(found, torch.tensor(rows))
    lower = naive.dense_of(block_sparse.softmax(values, pattern, "zero_upper_triangle"), pattern)
    rows = [[1, 0, 0, 0], [1 / (1 + e), e / (1 + e), 0, 0], [0, 0, 1, 0], [0, 0, 1 / 2, 1 / 2]]
    torch.testing.assert_close(lower, torch.tensor(rows))


def test_masked_elements_and_large_scores_are_finite():
    pattern = SparsePattern([0, 1], [0, 0], shape=(4, 2), block_size=2)
    values = torch.tensor(
        [[[1e30, -torch.inf], [-torch.inf, -torch.inf]], [[3e38, 3e38], [0, -1e9]]]
    )
    values.requires_grad_()
    found = block_sparse.softmax(values, pattern)
    wanted = torch.tensor([[[1, 0], [0, 0]], [[0.5, 0.5], [1, 0]]])
    torch.testing.assert_close(found, wanted)
    (grad,) = torch.autograd.grad(found[0, 0, 0] + found[1, 0, 0], values)
    assert grad.isfinite().all()


@pytest.mark.parametrize("block", [1, 3])
def test_first_and_second_gradients(block):
    pattern = SparsePattern([0, 0, 2], [1, 2, 0], shape=(3 * block, 3 * block), block_size=block)
    (values,) = leaves(drawn(2, *pattern.values_shape), dtype=torch.float64)
    dense = drawn(2, 3 * block, 2, seed=1).requires_grad_()

    def all_of_it(values, dense):
        scores = block_sparse.sampled_matmul(dense, dense.mT, pattern) + values
        weights = block_sparse.softmax(scores, pattern, "zero_lower_triangle")
        product = block_sparse.sparse_dense_matmul(weights, pattern, dense)
        return block_sparse.dense_sparse_matmul(product.mT, values, pattern)

    assert torch.autograd.gradcheck(all_of_it, (values, dense))
    if block == 1:
        assert torch.autograd.gradgradcheck(all_of_it, (values, dense))


def test_wrong_operands_raise():
    pattern = SparsePattern([0], [0], shape=(4, 8), block_size=2)
    values, dense = torch.ones(1, 2, 2), torch.ones(8, 3)
    wrong = [
        (
            lambda: block_sparse.sparse_dense_matmul(values[:, :1], pattern, dense),
            r"\[\.\.\., 1, 2, 2\]",
        ),
        (lambda: block_sparse.sparse_dense_matmul(values, pattern, dense[:4]), "k = 8"),
        (lambda: block_sparse.sparse_dense_matmul(values, pattern, dense.double()), "float32"),
        (lambda: block_sparse.dense_sparse_matmul(dense, values, pattern), "k = 4"),
        (lambda: block_sparse.sampled_matmul(dense, dense, pattern), "m = 4"),
        (
            lambda: block_sparse.sparse_dense_matmul(values.expand(3, 1, 2, 2), pattern, dense),
            "batch",
        ),
        (lambda: block_sparse.softmax(values, pattern, "upper"), "zero_upper_triangle"),
        (lambda: block_sparse.softmax(values.int(), pattern), "floating point"),
        (lambda: block_sparse.softmax(values, dense), "SparsePattern"),
    ]
    for call, words in wrong:
        with pytest.raises((ValueError, TypeError), match=words) as told:
            call()
        assert "\n" not in str(told.value)
