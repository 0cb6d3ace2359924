"""SparseMultiheadAttention equals nn.MultiheadAttention, in float64."""

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear, SparseMultiheadAttention

L, S, N, E, H = 5, 7, 3, 12, 4


class Holder(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, *args, **kwargs):
        return self.attention(*args, **kwargs)


def pair(start="magnitude", density=0.4, **options):
    """Return (sparse attention, dense attention with the same weights)."""
    sparse = Holder(nn.MultiheadAttention(E, H, **options).double())
    for bias in (sparse.attention.in_proj_bias, sparse.attention.out_proj.bias):
        if bias is not None:
            nn.init.normal_(bias)
    ds.sparsify(sparse, density, start=start, verbose=False)
    dense = ds.densify(Holder(sparse.attention))
    assert isinstance(sparse.attention, SparseMultiheadAttention)
    assert isinstance(dense.attention, nn.MultiheadAttention)
    return sparse, dense


def inputs(batch_first=False, batched=True, kdim=E, vdim=E):
    lead = [(L,), (S,), (S,)]
    if batched:
        lead = [(N, n[0]) if batch_first else (n[0], N) for n in lead]
    return [torch.randn(*n, w).double() for n, w in zip(lead, (E, kdim, vdim), strict=True)]


def check(sparse, dense, args, **kwargs):
    own, weights = sparse(*args, **kwargs)
    expected, expected_weights = dense(*args, **kwargs)
    torch.testing.assert_close(own, expected)
    if expected_weights is None:
        assert weights is None
    else:
        torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"kdim": 8, "vdim": 10},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    ],
)
def test_equals_dense_attention(options, batch_first, need_weights):
    sparse, dense = pair(batch_first=batch_first, **options)
    kdim, vdim = options.get("kdim", E), options.get("vdim", E)
    args = inputs(batch_first, True, kdim, vdim)
    check(sparse, dense, args, need_weights=need_weights)
    check(sparse, dense, inputs(batch_first, False, kdim, vdim), need_weights=need_weights)
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[0, 4:], padding[1, :2] = True, True
    look = torch.rand(L, S) < 0.3
    look[:, 3] = False
    each = torch.rand(N * H, L, S) < 0.3
    each[:, :, 3] = False
    for key_padding_mask in (None, padding):
        for attn_mask in (None, look, each):
            masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
            check(sparse, dense, args, need_weights=need_weights, **masks)
    floats = {
        "key_padding_mask": torch.randn(N, S).double(),
        "attn_mask": torch.randn(L, S).double(),
    }
    check(sparse, dense, args, need_weights=need_weights, average_attn_weights=False, **floats)


@pytest.mark.parametrize("need_weights", [True, False])
def test_causal(need_weights):
    sparse, dense = pair(batch_first=True)
    x = torch.randn(N, L, E).double()
    mask = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    padding = torch.zeros(N, L, dtype=torch.float64)
    padding[:, -1] = -torch.inf
    for extra in ({}, {"key_padding_mask": padding}):
        kwargs = {"need_weights": need_weights, "is_causal": True} | extra
        check(sparse, dense, (x, x, x), attn_mask=mask, **kwargs)
        # without a mask it makes its own
        expected = dense(x, x, x, attn_mask=mask, **kwargs)[0]
        torch.testing.assert_close(sparse(x, x, x, **kwargs)[0], expected)


def test_gradients_equal_dense_attention():
    sparse, dense = pair(batch_first=True)
    a, b = (torch.randn(N, L, E, generator=torch.Generator().manual_seed(1)).double()
            .requires_grad_() for _ in range(2))  # fmt: skip
    sparse(a, a, a)[0].square().sum().backward()
    dense(b, b, b)[0].square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    grads = dense.attention.in_proj_weight.grad.chunk(3)
    for name, grad in zip(("q_proj", "k_proj", "v_proj"), grads, strict=True):
        layer = getattr(sparse.attention, name)
        torch.testing.assert_close(layer.values.grad, layer.pattern.values_of(grad))


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_differs_between_steps_and_is_off_in_evaluation(need_weights):
    attention = SparseMultiheadAttention(E, H, dropout=0.5, density=0.5)
    x = torch.randn(L, N, E)
    first, second = (attention(x, x, x, need_weights=need_weights)[0] for _ in range(2))
    assert not torch.equal(first, second)
    attention.eval()
    first, second = (attention(x, x, x, need_weights=need_weights)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_constructor():
    g = torch.Generator().manual_seed(3)
    attention = SparseMultiheadAttention(
        16, 2, kdim=8, add_bias_kv=True, density=0.25, block_size=4, generator=g
    )
    assert [attention.q_proj.block_size, attention.k_proj.density] == [4, 0.25]
    assert (attention.embed_dim, attention.kdim, attention.vdim) == (16, 8, 16)
    assert not attention.out_proj.bias.any()
    assert "embed_dim=16, num_heads=2" in repr(attention)
    dense = ds.densify(Holder(attention)).attention
    assert dense.bias_k is attention.bias_k
    x, y = torch.randn(3, 2, 16), torch.randn(5, 2, 8)
    z = torch.randn(5, 2, 16)
    torch.testing.assert_close(attention(x, y, z)[0], dense(x, y, z)[0])


def test_projection_may_stay_dense():
    model = Holder(nn.MultiheadAttention(E, H, batch_first=True).double())
    out, before = model.attention.out_proj, model.attention.in_proj_weight.detach().clone()
    x = torch.randn(N, L, E).double()
    expected = model(x, x, x)[0]
    ds.sparsify(model, 1.0, exclude="*.out_proj", verbose=False)
    assert model.attention.in_proj_weight is not None  # density 1: nothing changed
    ds.sparsify(model, 0.5, exclude=["attention.out_proj", "*.v_proj"], verbose=False)
    attention = model.attention
    assert isinstance(attention.q_proj, SparseLinear)
    assert isinstance(attention.v_proj, nn.Linear)
    assert attention.out_proj is out or attention.out_proj.weight is out.weight
    assert torch.equal(attention.v_proj.weight, before.chunk(3)[2])
    for name in ("q_proj", "k_proj"):
        full = ds.SparsePattern.full((E, E))
        layer = SparseLinear(E, E, pattern=full, dtype=torch.float64)
        i = ("q_proj", "k_proj").index(name)
        layer.set_pattern(full, before.chunk(3)[i].flatten())
        layer.bias = getattr(attention, name).bias
        setattr(attention, name, layer)
    torch.testing.assert_close(model(x, x, x)[0], expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"embed_dim": 10, "num_heads": 4},
            ValueError,
            "must be a multiple of num_heads.*10 and 4",
        ),
        ({"embed_dim": 8, "num_heads": 0}, ValueError, "num_heads must be .* at least 1, got 0"),
        (
            {"embed_dim": 8, "num_heads": 2, "dropout": 1.5},
            ValueError,
            "dropout must be a number in",
        ),
        ({"embed_dim": 8, "num_heads": 2, "density": 0}, ValueError, r"density must be .*\(0, 1\]"),
        ({"embed_dim": 8, "num_heads": 2, "block_size": 3}, ValueError, "does not divide"),
    ],
)
def test_bad_settings(arguments, error, message):
    with pytest.raises(error, match=message):
        SparseMultiheadAttention(**arguments)


@pytest.mark.parametrize(
    ("masks", "error", "message"),
    [
        ({"attn_mask": torch.zeros(2, 2)}, ValueError, r"attn_mask must have the shape \[5, 7\]"),
        ({"key_padding_mask": torch.zeros(2, 2)}, ValueError, r"must have the shape \[3, 7\]"),
        (
            {"attn_mask": torch.zeros(5, 7).int()},
            TypeError,
            "bool or floating point, got torch.int",
        ),
    ],
)
def test_bad_masks(masks, error, message):
    attention = SparseMultiheadAttention(E, H, dtype=torch.float64)
    with pytest.raises(error, match=message):
        attention(*inputs(), **masks)


def test_nested_tensors_raise():
    attention = SparseMultiheadAttention(E, H, batch_first=True)
    x = torch.nested.nested_tensor([torch.randn(2, E), torch.randn(3, E)], layout=torch.jagged)
    with pytest.raises(RuntimeError, match="nested tensors are not supported: pad"):
        attention(x, x, x)
