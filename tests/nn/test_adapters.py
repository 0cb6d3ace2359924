"""PEFT's LoRA adapters on sparse layers."""

import warnings

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")
from dynsparse.integrations.peft import sparse_lora

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.down(self.up(x).relu())


def config():
    made = peft.LoraConfig(r=2, target_modules=["up", "down"])
    made._register_custom_module({SparseLinear: peft.tuners.lora.Linear})
    return made


def step(model, x):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def test_adapter_output_is_added_to_sparse_layers():
    base = ds.sparsify(Model(), 0.3, verbose=False)
    x = torch.randn(5, 16)
    before = base(x)
    tuned = peft.get_peft_model(base, config())
    torch.testing.assert_close(tuned(x), before)
    step(tuned, x)
    up = base.up
    assert not up.base_layer.values.requires_grad
    delta = up.lora_B["default"].weight @ up.lora_A["default"].weight * up.scaling["default"]
    assert delta.abs().sum() > 0
    expected = nn.functional.linear(x, up.base_layer.to_dense() + delta, up.base_layer.bias)
    torch.testing.assert_close(up(x), expected)
    with pytest.raises(RuntimeError, match=r"the dense weight of 'up' .* cannot be written to"):
        tuned.merge_adapter()
    torch.testing.assert_close(up(x), expected)


def test_sparsify_below_adapters():
    tuned = peft.get_peft_model(Model(), peft.LoraConfig(r=2, target_modules=["up", "down"]))
    ds.sparsify(tuned, 0.3, verbose=False)
    sparse = [name for name, m in tuned.named_modules() if isinstance(m, SparseLinear)]
    assert sparse == [f"base_model.model.{part}.base_layer" for part in ("up", "down")]
    x = torch.randn(5, 16)
    before = tuned(x)
    step(tuned, x)
    assert not torch.equal(tuned(x), before)


# An update at the pattern, which can be merged.


def sparse_model(dtype=torch.float64, **options):
    torch.manual_seed(0)
    base = ds.sparsify(Model().to(dtype), 0.3, verbose=False, **options)
    settings = peft.LoraConfig(r=2, target_modules=["up", "down"])
    return base, peft.get_peft_model(base, sparse_lora(settings))


def masked_weight(layer):
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    base = layer.get_base_layer()
    return base.to_dense() + delta * layer.scaling["default"] * base.pattern.to_mask()


@pytest.mark.parametrize("block_size", [1, 4])
def test_step_equals_masked_dense_layer(block_size):
    base, _ = sparse_model(block_size=block_size)
    up, x = base.up, torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    nn.init.normal_(up.lora_B["default"].weight)
    weights = [up.lora_A["default"].weight, up.lora_B["default"].weight, x]
    expected = nn.functional.linear(x, masked_weight(up), up.base_layer.bias)
    torch.testing.assert_close(up(x), expected)
    dy = torch.randn_like(expected)
    torch.testing.assert_close(torch.autograd.grad(up(x), weights, dy),
                               torch.autograd.grad(expected, weights, dy))  # fmt: skip
    assert torch.equal(up.get_delta_weight("default") == 0, ~up.base_layer.pattern.to_mask())


def test_merge_keeps_zeros():
    base, tuned = sparse_model()
    x = torch.randn(5, 16, dtype=torch.float64)
    zeros, values = base.up.base_layer.to_dense() == 0, base.up.base_layer.values.detach().clone()
    step(tuned, x)
    with tuned.disable_adapter():
        before = tuned(x)
    expected = tuned(x)
    assert not torch.allclose(before, expected)
    tuned.merge_adapter(safe_merge=True)
    assert torch.equal(base.up.base_layer.to_dense() == 0, zeros)
    torch.testing.assert_close(tuned(x), expected)
    tuned.unmerge_adapter()
    torch.testing.assert_close(base.up.base_layer.values.detach(), values)
    torch.testing.assert_close(tuned(x), expected)
    merged = tuned.merge_and_unload()
    assert isinstance(merged.up, SparseLinear)
    assert torch.equal(merged.up.to_dense() == 0, zeros)
    torch.testing.assert_close(merged(x), expected)


def test_safe_merge_rejects_nan():
    base, tuned = sparse_model()
    nn.init.constant_(base.up.lora_B["default"].weight, torch.nan)
    values = base.up.base_layer.values.detach().clone()
    with pytest.raises(ValueError, match="'default' has entries that are NaN or infinite"):
        tuned.merge_adapter(safe_merge=True)
    assert torch.equal(base.up.base_layer.values, values)


def test_dropout_applies_to_the_adapter_only():
    torch.manual_seed(0)
    base = ds.sparsify(Model().double(), 0.3, verbose=False)
    settings = peft.LoraConfig(r=2, target_modules=["up"], lora_dropout=0.5)
    tuned = peft.get_peft_model(base, sparse_lora(settings)).train()
    nn.init.normal_(base.up.lora_B["default"].weight)
    x = torch.randn(5, 16, dtype=torch.float64)
    torch.manual_seed(1)
    y = base.up(x)
    torch.manual_seed(1)
    dropped = nn.functional.dropout(x, 0.5)
    layer = base.up.base_layer
    torch.testing.assert_close(y, layer(x) + dropped @ base.up.get_delta_weight("default").t())
    tuned.eval()
    expected = nn.functional.linear(x, masked_weight(base.up), layer.bias)
    torch.testing.assert_close(base.up(x), expected)


def test_bfloat16_layers_have_float32_adapters():
    base, tuned = sparse_model(torch.bfloat16)
    x = torch.randn(5, 16, dtype=torch.bfloat16)
    assert base.up.lora_A["default"].weight.dtype == torch.float32
    step(tuned, x)
    expected = tuned(x)
    assert expected.dtype == torch.bfloat16
    torch.testing.assert_close(tuned.merge_and_unload()(x), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "sparse layers take plain LoRA: leave use_dora out"),
        ({"lora_bias": True}, "sparse layers take plain LoRA: leave lora_bias out"),
        (
            {"init_lora_weights": "pissa"},
            "init_lora_weights must be True, False or 'gaussian', got",
        ),
        ({"target_modules": "all-linear"}, "'all-linear' finds dense layers only: name the layers"),
    ],
)
def test_unsupported_lora_configs_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        sparse_lora(peft.LoraConfig(**{"r": 2, "target_modules": ["up"]} | settings))


def test_convolutions_and_mixed_batches_raise():
    conv = ds.sparsify(nn.Sequential(nn.Conv2d(4, 8, 3)), 0.5, verbose=False)
    with pytest.raises(ValueError, match="adapters need a sparse linear layer, got SparseConv2d"):
        peft.get_peft_model(conv, sparse_lora(peft.LoraConfig(r=2, target_modules=["0"])))
    base, _ = sparse_model()
    with pytest.raises(ValueError, match="one set of adapters per batch, not adapter_names"):
        base.up(torch.ones(1, 16).double(), adapter_names=["default"])


@pytest.mark.parametrize("convert", [ds.quantize, ds.densify])
def test_conversion_below_adapters_raises(convert):
    base, tuned = sparse_model(torch.float32)
    with pytest.raises(ValueError, match="has adapters: merge them first"):
        convert(tuned)
    assert isinstance(base.up.get_base_layer(), SparseLinear)
    convert(tuned.merge_and_unload())
