"""torch's default device places new parameters; other tensors stay on their layer's device."""

import pytest
import torch
from torch import nn

import dynsparse as ds

META = torch.device("meta")  # a tensor made there by mistake has no numbers


@pytest.mark.parametrize(
    "make",
    [
        lambda: ds.nn.SparseLinear(16, 8, 0.3),
        lambda: ds.nn.SparseConv2d(3, 8, 3, density=0.3),
        lambda: ds.nn.SparseEmbedding(10, 8, 0.5),
        lambda: ds.nn.SparseTransformerLayer(16, 2, 32, density=0.5),
    ],
)
def test_layers_are_created_on_the_default_device(make):
    with META:
        layer = make()
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    patterns = [m.pattern for m in layer.modules() if isinstance(m, ds.nn.SparseLinear)]
    assert {pattern.rows.device.type for pattern in patterns} == {"cpu"}


@pytest.fixture
def other_default():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def layers():
    torch.manual_seed(0)
    yield nn.Sequential(ds.nn.SparseLinear(64, 64, 0.3)), torch.randn(4, 64)
    yield nn.Sequential(ds.nn.SparseLinear(64, 64, 0.3, block_size=4)), torch.randn(4, 64)
    yield nn.Sequential(ds.nn.SparseConv2d(3, 8, 3, density=0.3)), torch.randn(4, 3, 9, 9)


@pytest.mark.parametrize("algorithm", ["RigL", "SET", "SNFS", "DeepR", "TopKAST"])
def test_training_ignores_the_default_device(algorithm):
    found = []
    for default in (None, "meta"):
        torch.set_default_device(None)
        for model, x in layers():
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            seed = {"seed": 1} if algorithm in ("SET", "DeepR", "TopKAST") else {}
            try:
                torch.set_default_device(default)
                trainer = getattr(ds, algorithm)(
                    model, optimizer, total_steps=100, update_interval=1, **seed
                )
                for _ in range(6):
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    trainer.step()
            finally:
                torch.set_default_device(None)
            assert trainer.updates >= 1
            found.append(model[0].to_dense().detach())
    half = len(found) // 2
    assert all(map(torch.equal, found[:half], found[half:]))


def test_conversion_and_loading_ignore_the_default_device(other_default, tmp_path):
    model = nn.Sequential(nn.Linear(16, 16, device="cpu"))
    ds.sparsify(model, density=0.3)
    other = nn.Sequential(ds.nn.SparseLinear(16, 16, 0.3, device="cpu"))
    other.load_state_dict(model.state_dict())
    ds.save_safetensors(model, tmp_path / "model.safetensors")
    ds.load_safetensors(other, tmp_path / "model.safetensors")
    assert torch.equal(other[0].to_dense(), model[0].to_dense())
    ds.densify(model)
    assert model[0].weight.device.type == "cpu"
    assert torch.equal(other[0].to_dense(), model[0].weight)


def test_int8_layers_ignore_the_default_device(other_default, tmp_path):
    model = nn.Sequential(nn.Linear(16, 16, device="cpu"))
    ds.sparsify(model, density=0.3, verbose=False)
    pattern, weight = model[0].pattern, model[0].to_dense()
    ds.quantize(model)
    assert model[0].pattern == pattern
    assert torch.allclose(model[0].to_dense(), weight, atol=weight.abs().max().item() / 254)
    ds.save_safetensors(model, tmp_path / "model.safetensors")
    loaded = nn.Sequential(nn.Linear(16, 16, device="cpu"))
    ds.load_pretrained(loaded, tmp_path / "model.safetensors")
    assert torch.equal(loaded[0].to_dense(), model[0].to_dense())
