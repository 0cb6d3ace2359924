"""Attention with features interleaved over the heads, in float64."""

import copy

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.distributed.placement import find_chains
from dynsparse.nn import SparseLinear, SparseMultiheadAttention, SparseTransformerLayer, attend

HEADS, DIM = 2, 3


def made(interleaved=True, **options):
    options = {"density": 0.6, "batch_first": True, "dtype": torch.float64} | options
    attention = SparseMultiheadAttention(HEADS * DIM, HEADS, interleaved=interleaved, **options)
    for module in attention.modules():
        if isinstance(module, SparseLinear) and module.bias is not None:
            nn.init.normal_(module.bias)
    return attention


def by_hand(attention, x):
    """Compute attention in which head h reads rows h, h + heads, ... of the projections."""
    q, k, v = (getattr(attention, f"{n}_proj")(x) for n in "qkv")
    mixed = torch.empty_like(v)
    for h in range(HEADS):
        own = slice(h, None, HEADS)
        scores = q[..., own] @ k[..., own].transpose(1, 2) / DIM**0.5
        mixed[..., own] = scores.softmax(-1) @ v[..., own]
    return attention.out_proj(mixed)


@pytest.mark.parametrize("need_weights", [True, False])
def test_head_has_every_second_feature(need_weights):
    attention = made()
    x = torch.randn(4, 5, HEADS * DIM).double()
    y, _ = attention(x, x, x, need_weights=need_weights)
    torch.testing.assert_close(y, by_hand(attention, x))
    attention.interleaved = False
    y, _ = attention(x, x, x, need_weights=need_weights)
    assert not torch.allclose(y, by_hand(attention, x))


@pytest.mark.parametrize(
    ("block_size", "heads", "head_dim", "run"),
    [(1, 4, 32, 1), (16, 4, 32, 4), (32, 4, 32, 4), (64, 16, 32, 4), (32, 16, 32, 2),
     (16, 16, 32, 1), (16, 4, 6, 2), (16, 4, 5, 1), (16, 3, 16, 1)],
)  # fmt: skip
def test_block_has_equal_features_of_each_head(block_size, heads, head_dim, run):
    assert attend.run_length(block_size, heads, head_dim) == run
    of_head = torch.arange(heads * head_dim) // run % heads
    if heads * head_dim % block_size == 0 and block_size % heads == 0:
        for block in of_head.split(block_size):
            assert block.bincount(minlength=heads).unique().numel() == 1
    order = attend.deinterleaved_order(heads * head_dim, heads, run)
    assert torch.equal(of_head[order], torch.arange(heads).repeat_interleave(head_dim))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("run", [None, 1, 2, 4])
def test_split_and_join_heads_by_hand(run, dtype):
    xs = [torch.randn(2, length, 24, dtype=dtype, requires_grad=True) for length in (5, 3)]
    strided = torch.randn(5, 2, 24, dtype=dtype).transpose(0, 1).requires_grad_()
    order = torch.arange(24) if run is None else attend.deinterleaved_order(24, 3, run)
    for x, y in zip([*xs, strided], attend.split_heads([*xs, strided], 3, run), strict=True):
        expected = x[..., order].unflatten(-1, (3, 8)).transpose(1, 2)
        assert torch.equal(y, expected)
        back = attend.join_heads(y, run)
        assert torch.equal(back, x)
        weights = torch.randn_like(x)
        seed = weights[..., order].unflatten(-1, (3, 8)).transpose(1, 2)
        for of, dy in ((back, weights), (y, seed)):
            (gradient,) = torch.autograd.grad(of, x, dy, retain_graph=True)
            assert torch.equal(gradient, weights)


@pytest.mark.parametrize("run", [2, 4])
def test_split_heads_has_second_derivatives_and_transforms(run):
    x = torch.randn(1, 2, 8, dtype=torch.float64, requires_grad=True)

    def turned(x):
        return attend.split_heads([x], 2, run)[0].square()

    assert torch.autograd.gradgradcheck(turned, x)
    both = torch.stack([x, 2 * x]).detach()
    assert torch.equal(torch.vmap(turned)(both)[1], turned(2 * x))


def test_block_reaches_all_heads():
    """With a single block of queries and keys, all heads attend if interleaved, else one."""
    reached = []
    for interleaved in (False, True):
        pattern = ds.SparsePattern([0], [0], shape=(8, 8), block_size=4)
        attention = SparseMultiheadAttention(8, 2, interleaved=interleaved, batch_first=True)
        for name in ("q_proj", "k_proj"):
            setattr(attention, name, SparseLinear(8, 8, bias=False, pattern=pattern))
        x = torch.randn(1, 6, 8)
        _, weights = attention(x, x, x, average_attn_weights=False)
        reached.append([bool(head.std() > 1e-4) for head in weights[0]])
    assert reached == [[True, False], [True, True]]


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"add_bias_kv": True}, {"kdim": 4, "vdim": 8}], ids=str
)
def test_equals_densified_attention(options):
    attention = made(**options)
    dense = ds.densify(nn.Sequential(copy.deepcopy(attention)))[0]
    assert isinstance(dense, nn.MultiheadAttention)
    inputs = [
        torch.randn(4, n, width).double()
        for n, width in ((5, HEADS * DIM), (6, attention.kdim), (6, attention.vdim))
    ]
    for own, theirs in zip(attention(*inputs), dense(*inputs), strict=True):
        torch.testing.assert_close(own, theirs)


@pytest.mark.parametrize("interleaved", [False, True])
def test_weights_of_the_other_order_raise(interleaved):
    saved = made(interleaved).state_dict()
    same, other = made(interleaved), made(not interleaved)
    same.load_state_dict(saved)
    x = torch.randn(4, 5, HEADS * DIM).double()
    assert torch.equal(same(x, x, x)[0], same(x, x, x)[0])
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=f"got weights of interleaved={interleaved}"):
            other.load_state_dict(saved, strict=strict)


@pytest.mark.parametrize("run", [torch.tensor(1), torch.tensor(3), torch.tensor([4]), 4, None])
def test_damaged_interleave_length_raises(run):
    attention = SparseMultiheadAttention(16, 2, block_size=8, density=0.6, interleaved=True)
    assert attention.interleave_length == 4
    saved = attention.state_dict()
    attention.load_state_dict(saved)
    saved["interleaved_heads"] = run
    with pytest.raises(RuntimeError, match="'interleaved_heads' of the weights to be 4, got"):
        attention.load_state_dict(saved)


def test_interleaved_heads_cannot_be_sharded():
    model = nn.Sequential(SparseTransformerLayer(8, 2, 16, interleaved=True))
    with pytest.raises(ValueError, match=r"'0\.attention' has interleaved=True"):
        find_chains(model)


def test_pattern_update_and_compile():
    layer = SparseTransformerLayer(
        8, 2, 16, dropout=0.0, interleaved=True, density=0.5, block_size=4
    )
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    trainer = ds.RigL(layer, optimizer, total_steps=20, update_interval=2, drop_fraction=0.5)
    x = torch.randn(4, 3, 8)
    for _ in range(4):
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        trainer.step()
    assert trainer.updates == 2
    torch.testing.assert_close(compiled(x), layer(x))


def test_wrong_flag_raises():
    with pytest.raises(TypeError, match="interleaved"):
        SparseMultiheadAttention(8, 2, interleaved="yes")
