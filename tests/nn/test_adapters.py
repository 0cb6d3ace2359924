"""LoRA of PEFT over sparse layers, and sparse layers under LoRA."""

import warnings

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")
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


def test_adapters_over_sparse_layers_add_what_they_should():
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


def test_sparse_layers_under_adapters():
    tuned = peft.get_peft_model(Model(), peft.LoraConfig(r=2, target_modules=["up", "down"]))
    ds.sparsify(tuned, 0.3, verbose=False)
    sparse = [name for name, m in tuned.named_modules() if isinstance(m, SparseLinear)]
    assert sparse == [f"base_model.model.{part}.base_layer" for part in ("up", "down")]
    x = torch.randn(5, 16)
    before = tuned(x)
    step(tuned, x)
    assert not torch.equal(tuned(x), before)
