"""The pre-norm layer equals torch's, and trains."""

import copy

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear, SparseMultiheadAttention, SparseTransformerLayer


def test_equals_torch_layer():
    layer = SparseTransformerLayer(16, 4, 32, dropout=0.0, density=0.4, block_size=4).double()
    for module in layer.modules():
        if isinstance(module, SparseLinear):
            nn.init.normal_(module.bias)
    dense = nn.TransformerEncoderLayer(
        16, 4, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    ).double()
    copied = ds.densify(copy.deepcopy(layer))
    dense.self_attn = copied.attention
    for name in ("norm1", "norm2", "linear1", "linear2"):
        setattr(dense, name, getattr(copied, name))
    x = torch.randn(3, 5, 16).double()
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = True
    mask = torch.ones(5, 5).triu(1).bool()
    torch.testing.assert_close(layer(x), dense(x))
    torch.testing.assert_close(layer(x, is_causal=True), dense(x, mask))
    torch.testing.assert_close(
        layer(x, mask, padding), dense(x, mask, src_key_padding_mask=padding)
    )


def test_head_size_of_the_original():
    layer = SparseTransformerLayer(
        96, 16, 48, head_dim=32, attention_bias=False, density=0.1, block_size=8
    )
    attention = layer.attention
    assert (attention.embed_dim, attention.head_dim) == (96, 32)
    assert attention.q_proj.pattern.shape == (512, 96)
    assert attention.out_proj.pattern.shape == (96, 512)
    assert attention.q_proj.bias is None
    assert layer(torch.randn(2, 28, 96)).shape == (2, 28, 96)
    before = list(layer.modules())
    with pytest.raises(ValueError, match="'attention' has 16 heads of 32 for 96 features"):
        ds.densify(layer)
    assert all(a is b for a, b in zip(layer.modules(), before, strict=True))


@pytest.mark.slow
def test_updates_do_not_recompile():
    model = nn.Sequential(*(SparseTransformerLayer(8, 2, 16, dropout=0.0) for _ in range(2)))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = ds.RigL(model, optimizer, total_steps=20, update_interval=2)
    x = torch.randn(4, 3, 8)
    torch.testing.assert_close(compiled(x), model(x))
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(6):
            optimizer.zero_grad()
            compiled(x).square().mean().backward()
            trainer.step()
        torch.testing.assert_close(compiled(x), model(x))
    assert trainer.updates == 3


def test_under_autocast():
    layer = SparseTransformerLayer(16, 2, 32, dropout=0.0, density=0.5)
    x = torch.randn(2, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x, is_causal=True)
    torch.testing.assert_close(low.float(), layer(x, is_causal=True), atol=0.05, rtol=0.05)
    low.float().sum().backward()
    assert layer.linear1.values.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_dim": 0}, "head_dim must be an integer of at least 1, got 0"),
        ({"dropout": -0.1}, "dropout must be a number in"),
    ],
)
def test_bad_input(arguments, message):
    arguments = {"features": 16, "num_heads": 4, "hidden_features": 32} | arguments
    with pytest.raises(ValueError, match=message):
        SparseTransformerLayer(**arguments)


def test_head_size_with_cross_attention():
    attention = SparseMultiheadAttention(6, 3, kdim=5, head_dim=4, add_bias_kv=True, density=0.5)
    query, key, value = torch.randn(2, 6), torch.randn(4, 5), torch.randn(4, 6)
    output, weights = attention(query, key, value)
    assert (output.shape, weights.shape) == ((2, 6), (2, 5))
