"""Values in slots of any order: every product is that of the same weights in row-major order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dynsparse import SparsePattern
from dynsparse.ops import use_kernel
from dynsparse.ops.embedding import embedding
from dynsparse.ops.linear import grad_input, grad_weight, linear
from dynsparse.ops.linear.cuda import dense as cuda_dense
from dynsparse.ops.linear.layer_index import LayerIndex

KINDS = ("sparse", "small", "dense")
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-12}


def shuffled(shape, density, block, seed=0):
    """A pattern, and the same blocks in slots of another order, which is given too."""
    generator = torch.Generator().manual_seed(seed)
    pattern = SparsePattern.random(shape, density, block_size=block, generator=generator)
    order = torch.randperm(pattern.nnz, generator=generator)
    other = SparsePattern._by_slots(pattern.flat[order], pattern)
    assert other == pattern
    assert torch.equal(other.rows, pattern.rows[order])
    assert torch.equal(other.cols, pattern.cols[order])
    return pattern, other, order


def error(got, wanted):
    return float((got.detach().double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("block", [1, 4, 16, 64])
@pytest.mark.parametrize("batch", [1, 40, 300])
def test_products(batch, block, dtype, kind):
    shape = (6 * max(block, 16), 5 * max(block, 16))
    pattern, other, order = shuffled(shape, 0.3, block)
    weight = torch.randn(pattern.values_shape, dtype=torch.float64)
    wide = pattern.to_dense(weight)
    x, dy = (torch.randn(batch, n, dtype=torch.float64) for n in reversed(shape))
    values = weight[order].to(torch.float32 if dtype is torch.bfloat16 else dtype)
    values, given = values.clone().requires_grad_(), x.to(dtype, copy=True).requires_grad_()
    with use_kernel(kind):
        y = linear(given, values, other.index)
        y.backward(dy.to(dtype))
        limit = LIMITS[dtype]
        assert error(y, x @ wide.t()) < limit
        assert error(given.grad, dy @ wide) < limit
        assert error(values.grad, other.values_of(dy.t() @ x)) < limit
        # One gradient at a time goes other ways.
        plain = values.detach()
        assert error(grad_input(dy.to(dtype), plain, other), dy @ wide) < limit
        alone = grad_weight(dy.to(dtype), x.to(dtype), plain, other)
        assert error(alone, other.values_of(dy.t() @ x)) < limit


def test_panels():
    """So many samples and entries that they are worked on by panels."""
    pattern, other, order = shuffled((400, 3000), 0.1, 1)
    x, dy = torch.randn(300, 3000), torch.randn(300, 400)
    weight = torch.randn(pattern.nnz)
    results = []
    for p, values in ((pattern, weight), (other, weight[order])):
        values, given = values.clone().requires_grad_(), x.clone().requires_grad_()
        with use_kernel("sparse"):
            y = linear(given, values, LayerIndex(p.index, values))
            y.backward(dy)
        results.append((y, given.grad, p.to_dense(values.grad)))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@settings(max_examples=40)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 9),
    st.integers(1, 9),
    st.floats(0, 1),
    st.integers(0, 70),
    st.integers(0, 99),
)
def test_any_layer(block, height, width, density, batch, seed):
    pattern, other, order = shuffled((height * block, width * block), density, block, seed)
    weight = torch.randn(pattern.values_shape)
    x = torch.randn(batch, width * block)
    wanted = linear(x, weight, pattern)
    torch.testing.assert_close(linear(x, weight[order], other), wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(other.to_dense(weight[order]), pattern.to_dense(weight))
    assert torch.equal(other.values_of(pattern.to_dense(weight)), weight[order])
    there = other.to_scipy(weight[order].numpy()).toarray()
    assert torch.equal(torch.from_numpy(there), pattern.to_dense(weight))
    assert torch.equal(other.values_of(other.to_scipy(weight[order])), weight[order])


@pytest.mark.parametrize("block", [1, 4])
def test_the_dense_way_of_devices(block):
    pattern, other, order = shuffled((32, 48), 0.3, block)
    weight = torch.randn(pattern.values_shape)
    x, dy = torch.randn(20, 48), torch.randn(20, 32)
    p = LayerIndex(other._thin_index(), weight)
    y = cuda_dense.forward(x, weight[order], p, None)
    dx, dw = cuda_dense.backward(dy, x, weight[order], p, True, True)
    wide = pattern.to_dense(weight)
    torch.testing.assert_close(y, x @ wide.t())
    torch.testing.assert_close(dx, dy @ wide)
    torch.testing.assert_close(dw, other.values_of(dy.t() @ x))


@pytest.mark.parametrize("block", [1, 2])
def test_tables(block):
    pattern, other, order = shuffled((20, 8), 0.4, block)
    weight = torch.randn(pattern.values_shape)
    ids = torch.tensor([[3, 0, 3], [19, 7, 8]])
    values = weight[order].requires_grad_()
    rows = embedding(ids, values, other, 8)
    wide = pattern.to_dense(weight).requires_grad_()
    wanted = nn.functional.embedding(ids, wide)
    assert torch.equal(rows, wanted)
    dy = torch.randn_like(rows)
    rows.backward(dy)
    wanted.backward(dy)
    torch.testing.assert_close(values.grad, other.values_of(wide.grad))


@pytest.mark.parametrize("slots", [(0, 0, 1, 2), (0, 1, 2, 4), (-1, 0, 1, 2)])
def test_slots_that_are_none_are_refused(slots):
    pattern = SparsePattern([0, 0, 1, 2], [0, 2, 1, 2], shape=(3, 3))
    index = pattern.index._replace(slots=torch.tensor(slots, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="slots must"):
        linear(torch.ones(2, 3), torch.ones(4), index)
