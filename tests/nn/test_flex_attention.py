"""Attention with FlexAttention's `score_mod` and `block_mask` equals masked SDPA."""

import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from dynsparse.nn import SparseMultiheadAttention
from dynsparse.nn.attend import attend_flex

N, HEADS, LENGTH = 2, 4, 9


def window(b, h, i, j):
    return (i >= j) & (i - j < 3 + h)


def sloped(score, b, h, i, j):
    return score - (i - j).abs() * (0.1 * (h + 1))


def mask_of(length=LENGTH, keys=LENGTH, function=window):
    return create_block_mask(function, N, HEADS, length, keys, device="cpu", BLOCK_SIZE=16)


def added(dtype, mask, slope):
    """Return the attn_mask that SDPA adds to the scores."""
    h, i, j = (torch.arange(n).view(shape) for n, shape in
               ((HEADS, (-1, 1, 1)), (LENGTH, (-1, 1)), (LENGTH, (-1,))))  # fmt: skip
    bias = torch.zeros(HEADS, LENGTH, LENGTH, dtype=dtype)
    if slope:
        bias = bias - (i - j).abs() * (0.1 * (h + 1))
    return bias.masked_fill(~window(0, h, i, j), -torch.inf) if mask else bias


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("mask", "slope"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("batch_first", [True, False])
def test_equals_masked_attention(dtype, mask, slope, batch_first):
    layer = SparseMultiheadAttention(
        32, HEADS, density=0.3, batch_first=batch_first, dtype=dtype, bias=False
    )
    shape = (N, LENGTH, 32) if batch_first else (LENGTH, N, 32)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    own = {"score_mod": sloped if slope else None, "block_mask": mask_of() if mask else None}
    y, weights = layer(x, x, x, need_weights=False, **own)
    assert weights is None
    bias = added(dtype, mask, slope).repeat(N, 1, 1)
    wanted, _ = layer(x, x, x, need_weights=False, attn_mask=bias)
    torch.testing.assert_close(y, wanted)
    dy = torch.randn_like(y)
    leaves = [x, *layer.parameters()]
    grads = torch.autograd.grad(y, leaves, dy)
    for got, other in zip(grads, torch.autograd.grad(wanted, leaves, dy), strict=True):
        torch.testing.assert_close(got, other)


def test_learned_bias_gets_a_gradient():
    bias = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    q, k, v = torch.randn(3, N, HEADS, LENGTH, 8, dtype=torch.float64)

    def steeper(score, b, h, i, j):
        return score * bias[h]

    y = attend_flex(q, k, v, steeper, None)
    wanted = scaled_dot_product_attention(q * bias.view(-1, 1, 1), k, v)
    torch.testing.assert_close(y, wanted)
    (got,), (other,) = (torch.autograd.grad(t.square().sum(), bias) for t in (y, wanted))
    torch.testing.assert_close(got, other)


def test_fully_masked_query_gets_zeros():
    q = torch.randn(N, HEADS, LENGTH, 8, requires_grad=True)
    y = attend_flex(q, q, q, None, mask_of(function=lambda b, h, i, j: (i > 2) & (j > i - 3)))
    assert not y[:, :, :3].any()
    y.sum().backward()
    assert bool(q.grad.isfinite().all())


def test_equals_torch_flex_attention():
    q, k, v = torch.randn(3, N, HEADS, LENGTH, 8, dtype=torch.float64)
    mask = mask_of()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled here
        wanted = flex_attention(q, k, v, sloped, mask)
    torch.testing.assert_close(attend_flex(q, k, v, sloped, mask), wanted)


def test_bad_arguments_raise():
    layer = SparseMultiheadAttention(32, HEADS, dropout=0.1, batch_first=True)
    x = torch.randn(N, LENGTH, 32)
    with pytest.raises(
        ValueError, match="cannot be combined with need_weights=True, dropout: leave one"
    ):
        layer(x, x, x, score_mod=sloped)
    layer.eval()
    with pytest.raises(ValueError, match="cannot be combined with is_causal"):
        layer(x, x, x, need_weights=False, is_causal=True, score_mod=sloped)
    with pytest.raises(ValueError, match="cannot be combined with attn_mask, key_padding_mask"):
        layer(x, x, x, torch.zeros(N, LENGTH), False, torch.zeros(9, 9), block_mask=mask_of())
    with pytest.raises(TypeError, match="score_mod must be a function or None, got int"):
        layer(x, x, x, need_weights=False, score_mod=3)
    with pytest.raises(TypeError, match="block_mask must be a result of create_block_mask"):
        layer(x, x, x, need_weights=False, block_mask=torch.ones(9, 9))
    with pytest.raises(ValueError, match="block_mask is for 8 queries and 9 keys, got 9 and 9"):
        layer(x, x, x, need_weights=False, block_mask=mask_of(8))
    layer = SparseMultiheadAttention(32, HEADS, batch_first=True, add_zero_attn=True)
    with pytest.raises(ValueError, match="cannot be combined with add_bias_kv and add_zero_attn"):
        layer(x, x, x, need_weights=False, score_mod=sloped)
