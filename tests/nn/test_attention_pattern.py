"""Attention restricted to the blocks of a pattern equals masked dense attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import attention_patterns

TOKENS = 48
PATTERNS = {
    "window": attention_patterns.sliding_window(TOKENS, 5, block_size=8),
    "longformer": attention_patterns.longformer(TOKENS, 9, 1, block_size=16),
    "strided": attention_patterns.strided(TOKENS, 16, block_size=8),
    "big bird": attention_patterns.big_bird(
        TOKENS, block_size=4, generator=torch.Generator().manual_seed(0)
    ),
    "elements": ds.SparsePattern.random((TOKENS, TOKENS), 0.3),
}


def layer(pattern, dtype=torch.float32, **named):
    torch.manual_seed(0)
    made = ds.nn.SparseMultiheadAttention(
        16, 2, batch_first=True, density=0.4, attention_pattern=pattern, dtype=dtype, **named
    )
    for parameter in made.parameters():  # biases, too
        nn.init.normal_(parameter, std=0.3)
    return made


def with_mask(pattern, causal):
    """Return the mask of torch's attention: True where a query may not attend."""
    seen = pattern.to_mask()
    # Rows that see nothing are NaN in a dense attention.
    assert (seen.tril() if causal else seen).any(1).all()
    return ~(seen.tril() if causal else seen)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_equals_masked_dense_attention(name, causal, dtype, tolerance):
    pattern = PATTERNS[name]
    diagonal = range(pattern.grid[0])
    rows = [*pattern.rows.tolist(), *diagonal]
    pairs = sorted({*zip(rows, [*pattern.cols.tolist(), *diagonal], strict=True)})
    pattern = ds.SparsePattern(
        [r for r, _ in pairs], [c for _, c in pairs], shape=pattern.shape,
        block_size=pattern.block_size,
    )  # fmt: skip
    sparse, dense = layer(pattern, dtype), layer(None, dtype)
    x = torch.randn(2, TOKENS, 16, dtype=dtype, requires_grad=True)
    away = torch.zeros(2, TOKENS, dtype=torch.bool)
    away[0, TOKENS - 1] = True  # seen by others as well as by itself
    found = {}
    for which, made in (("sparse", sparse), ("dense", dense)):
        mask = {} if which == "sparse" else {"attn_mask": with_mask(pattern, causal)}
        is_causal = causal and which == "sparse"
        for weights in (False, True):
            y, seen = made(
                x, x, x, need_weights=weights, is_causal=is_causal, average_attn_weights=False,
                key_padding_mask=None if causal else away, **mask,
            )  # fmt: skip
            if not causal:
                y = y[:, :-1]  # the last token of the first sequence may see nothing at all
            grads = torch.autograd.grad(y.square().sum(), [x, *made.parameters()])
            found[which, weights] = [y, *grads, *([] if seen is None else [seen[:, :, :-1]])]
    for weights in (False, True):
        pairs = zip(found["sparse", weights], found["dense", weights], strict=True)
        for one, other in pairs:
            scale = max(1.0, other.abs().max().item())
            assert (one - other).abs().max() <= tolerance * scale


def test_unbatched_and_sequence_first_inputs():
    pattern = PATTERNS["window"]
    made = layer(pattern)
    x = torch.randn(2, TOKENS, 16)
    y, weights = made(x, x, x)
    assert weights.shape == (2, TOKENS, TOKENS)
    assert not weights[:, ~pattern.to_mask()].any()
    one, weight = made(x[1], x[1], x[1])
    torch.testing.assert_close(one, y[1])
    torch.testing.assert_close(weight, weights[1])
    made.batch_first = False
    turned, _ = made(*[x.transpose(0, 1)] * 3, need_weights=False)
    torch.testing.assert_close(turned.transpose(0, 1), y)


def test_different_numbers_of_queries_and_keys():
    pattern = ds.SparsePattern([0, 1, 2], [1, 0, 0], shape=(12, 8), block_size=4)
    made = layer(pattern)
    q, k = torch.randn(2, 12, 16), torch.randn(2, 8, 16)
    y, _ = made(q, k, k, need_weights=False)
    dense = layer(None)
    wanted, _ = dense(q, k, k, attn_mask=~pattern.to_mask(), need_weights=False)
    torch.testing.assert_close(y, wanted)


def test_dropout_in_training_only():
    made = layer(PATTERNS["longformer"], dropout=0.5)
    x = torch.randn(1, TOKENS, 16)
    calls = {"need_weights": False}
    first, second = (made(x, x, x, **calls)[0] for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    first, _ = made(x, x, x, **calls)
    torch.manual_seed(3)
    assert torch.equal(made(x, x, x, **calls)[0], first)
    made.eval()
    assert torch.equal(made(x, x, x, **calls)[0], made(x, x, x, **calls)[0])
    made.train().dropout = 1.0
    torch.testing.assert_close(made(x, x, x, **calls)[0][0], made.out_proj.bias.expand(TOKENS, -1))


def test_in_torch_transformer_layers_and_compiled():
    pattern = PATTERNS["strided"]
    block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = ds.sparsify(nn.Sequential(block), density=0.5, verbose=False).eval()
    attention = model[0].self_attn
    x = torch.randn(2, TOKENS, 16)
    mask = ~pattern.to_mask()
    wanted = model[0](x, src_mask=mask)
    attention.attention_pattern = pattern
    torch.testing.assert_close(model[0](x), wanted)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), wanted)


def test_transformer_layer():
    pattern = PATTERNS["window"]
    made = ds.nn.SparseTransformerLayer(16, 2, 32, dropout=0, attention_pattern=pattern)
    x = torch.randn(1, TOKENS, 16)
    y = made(x, is_causal=True)
    made.attention.attention_pattern = None
    wanted = made(x, attn_mask=with_mask(pattern, True))
    torch.testing.assert_close(y, wanted)


def test_state_dict_contains_the_pattern(tmp_path):
    first, second = (layer(ds.SparsePattern.random((16, 16), 0.5, block_size=4)) for _ in range(2))
    x = torch.randn(1, 16, 16)
    state = first.state_dict()
    assert state["attention_rows"].dtype == torch.int32
    second.load_state_dict(state)
    assert second.attention_pattern == first.attention_pattern
    assert torch.equal(second(x, x, x)[0], first(x, x, x)[0])
    ds.save_safetensors(nn.Sequential(first), tmp_path / "model.safetensors")
    third = layer(ds.SparsePattern.random((16, 16), 0.5, block_size=4))
    ds.load_safetensors(nn.Sequential(third), tmp_path / "model.safetensors")
    assert third.attention_pattern == first.attention_pattern

    without = layer(None)
    with pytest.raises(RuntimeError, match=r"Unexpected.*attention_rows"):
        without.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing.*attention_rows"):
        first.load_state_dict(without.state_dict())
    other = layer(ds.SparsePattern.full((8, 8), block_size=4))
    before = other.attention_pattern
    with pytest.raises(RuntimeError, match="attention_pattern of 'the attention' does not fit"):
        other.load_state_dict(state)
    assert other.attention_pattern is before


def test_incompatible_options_raise():
    pattern = PATTERNS["window"]
    x = torch.randn(1, TOKENS, 16)
    made = layer(pattern)
    wrong = [
        (lambda: made(x, x, x, attn_mask=torch.zeros(TOKENS, TOKENS)), "include it in the pattern"),
        (lambda: made(x[:, :8], x, x), "for 48 queries and 48 keys, got 8 and 48"),
        (
            lambda: made(x, x, x, score_mod=lambda s, *_: s, need_weights=False),
            "cannot be combined with attention_pattern",
        ),
        (lambda: layer(pattern, add_zero_attn=True), "add_zero_attn"),
        (lambda: layer(pattern, add_bias_kv=True), "add_bias_kv"),
        (lambda: layer("window"), "attention_pattern must be"),
        (lambda: setattr(made, "attention_pattern", 3), "SparsePattern or None"),
        (lambda: ds.densify(nn.Sequential(made)), "attention '0' has an attention_pattern"),
    ]
    for call, words in wrong:
        with pytest.raises((ValueError, TypeError), match=words) as told:
            call()
        assert "\n" not in str(told.value)
    # The promise of is_causal that a mask is that very one is taken.
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    torch.testing.assert_close(
        made(x, x, x, attn_mask=mask, is_causal=True)[0], made(x, x, x, is_causal=True)[0]
    )


def test_training_step_keeps_the_pattern():
    pattern = PATTERNS["big bird"]
    model = nn.Sequential(nn.Linear(16, 16), ds.nn.SparseTransformerLayer(
        16, 2, 32, density=0.5, attention_pattern=pattern))  # fmt: skip
    trainer = ds.RigL(
        model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=4, update_interval=1
    )
    for _ in range(2):
        model(torch.randn(2, TOKENS, 16)).square().mean().backward()
        trainer.step()
        trainer.optimizer.zero_grad()
    assert trainer.updates
    assert model[1].attention.attention_pattern is pattern


# ---- the patterns ----


def test_patterns_by_hand():
    window = attention_patterns.sliding_window(8, 1, block_size=2)
    assert window.to_mask()[::2, ::2].int().tolist() == [
        [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]
    ]  # fmt: skip
    nearly = attention_patterns.sliding_window(8, 0, block_size=2)
    assert torch.equal(nearly.rows, nearly.cols)
    strided = attention_patterns.strided(12, 4, block_size=2)
    assert strided.to_mask()[::2, ::2].int().tolist() == [
        [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 0], [0, 1, 0, 1, 1, 1],
    ]  # fmt: skip
    longer = attention_patterns.longformer(8, 0, 1, block_size=2, causal=True)
    assert longer.to_mask()[::2, ::2].int().tolist() == [
        [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]
    ]  # fmt: skip


@pytest.mark.parametrize("window", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("block", [1, 2, 3])
def test_window_pattern_covers_the_window(window, block):
    apart = (torch.arange(12)[:, None] - torch.arange(12)).abs()
    wanted = ds.SparsePattern.from_mask(apart <= window, block)
    assert attention_patterns.sliding_window(12, window, block_size=block) == wanted


@pytest.mark.parametrize("causal", [False, True])
def test_big_bird_number_of_random_blocks(causal):
    generator = torch.Generator().manual_seed(1)
    made = attention_patterns.big_bird(80, block_size=4, causal=causal, generator=generator)
    plain = attention_patterns.big_bird(80, block_size=4, causal=causal, random_blocks=0)
    assert bool(made.contains(plain.flat).all())
    more = made.row_ptr.diff() - plain.row_ptr.diff()
    left = [(row + 1 if causal else 20) - n for row, n in enumerate(plain.row_ptr.diff().tolist())]
    assert more.tolist() == [min(3, one) for one in left]
    again = attention_patterns.big_bird(
        80, block_size=4, causal=causal, generator=torch.Generator().manual_seed(1)
    )
    assert again == made
    if causal:
        assert bool((made.rows >= made.cols).all())


def test_pattern_functions_reject_bad_arguments():
    wrong = [
        (lambda: attention_patterns.sliding_window(10, 1, block_size=4), "multiple of the block"),
        (lambda: attention_patterns.strided(16, 6, block_size=4), "stride must be a multiple"),
        (lambda: attention_patterns.big_bird(16, block_size=4, window_blocks=2), "odd"),
        (lambda: attention_patterns.longformer(32, -1, 0), "window"),
    ]
    for call, words in wrong:
        with pytest.raises(ValueError, match=words):
            call()
    assert math.isclose(PATTERNS["window"].density, 16 / 36)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_empty_batch(need_weights, padded):
    attention = layer(PATTERNS["window"])
    x = torch.randn(0, TOKENS, 16, requires_grad=True)
    padding = torch.zeros(0, TOKENS, dtype=torch.bool) if padded else None
    y, weights = attention(x, x, x, need_weights=need_weights, key_padding_mask=padding)
    assert y.shape == (0, TOKENS, 16)
    assert weights.shape == (0, TOKENS, TOKENS) if need_weights else weights is None
    y.sum().backward()
    assert x.grad.shape == x.shape
