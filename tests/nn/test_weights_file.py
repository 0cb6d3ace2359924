"""save_safetensors, load_safetensors: round trips, reading without the library, bad files."""

import json

import numpy as np
import pytest
import safetensors
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseEmbedding, SparseLinear, SparseTransformerLayer


class Model(nn.Module):
    """A model with an embedding, a transformer layer and a tied head."""

    def __init__(self, seed=0, density=0.25, block=4, hidden=32, dtype=None):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.embed = SparseEmbedding(20, 16, density, generator=g, dtype=dtype)
        self.layer = SparseTransformerLayer(
            16, 2, hidden, density=density, block_size=block, generator=g, dtype=dtype
        )
        self.first = nn.Linear(16, 16, dtype=dtype)
        self.second = nn.Linear(16, 16, bias=False, dtype=dtype)
        self.second.weight = self.first.weight
        self.also = self.embed
        self.register_buffer("scale", torch.arange(12.0).view(3, 4).t())

    def forward(self, ids):
        return self.second(self.first(self.layer(self.embed(ids)))).sum() * self.scale.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 4])
def test_round_trip(tmp_path, dtype, block):
    first, second = Model(1, block=block, dtype=dtype), Model(2, block=block, dtype=dtype)
    path = tmp_path / "model.safetensors"
    ds.save_safetensors(first, path, {"step": "12"})
    kept = {name: id(p) for name, p in second.named_parameters()}
    assert ds.load_safetensors(second, path) == {"step": "12"}
    assert {name: id(p) for name, p in second.named_parameters()} == kept
    state = second.state_dict()
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert first.layer.linear1.pattern == second.layer.linear1.pattern
    ids = torch.arange(6).view(2, 3)
    assert torch.equal(first.eval()(ids), second.eval()(ids))
    assert list(tmp_path.iterdir()) == [path]


def positions(tensors, name):
    """Decode the positions of present blocks from the stored bits."""
    if f"{name}.mask" in tensors:
        mask = tensors[f"{name}.mask"]
        return [at for at in range(8 * len(mask)) if int(mask[at // 8]) >> at % 8 & 1]
    at, found = 0, []
    for byte in tensors[f"{name}.gaps"]:
        at += int(byte)
        if byte < 255:
            found.append(at)
            at += 1
    return found


def test_files_can_be_read_without_the_library(tmp_path):
    model = Model()
    path = tmp_path / "model.safetensors"
    ds.save_safetensors(model, path)
    tensors = load_file(path)
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    layers = json.loads(metadata["layers"])
    assert layers.keys() == {
        n for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, SparseLinear)
    }
    aliases = json.loads(metadata["aliases"])
    assert aliases["second.weight"] == "first.weight"
    for name, about in layers.items():
        b = about["block_size"]
        values = tensors[aliases.get(k := f"{name}.values", k)]
        dense = np.zeros(about["shape"], dtype=np.float32)
        for at, block in zip(positions(tensors, name), values, strict=True):
            row, col = divmod(at, about["shape"][1] // b)
            dense[row * b : (row + 1) * b, col * b : (col + 1) * b] = block
        np.testing.assert_array_equal(dense, model.get_submodule(name).to_dense().detach().numpy())


def test_optimizer_continues_after_loading(tmp_path):
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    ds.save_safetensors(Model(3), tmp_path / "m")
    ds.load_safetensors(model, tmp_path / "m")
    before = model.layer.linear1.values.clone()
    model(torch.arange(4)[None]).backward()
    optimizer.step()
    assert not torch.equal(before, model.layer.linear1.values)


def test_single_layer_and_dense_model(tmp_path):
    for make in (lambda: SparseLinear(8, 8, 0.5), lambda: nn.Linear(3, 3)):
        first, second = make(), make()
        ds.save_safetensors(first, tmp_path / "m")
        ds.load_safetensors(second, tmp_path / "m")
        x = torch.randn(2, 8 if isinstance(first, SparseLinear) else 3)
        assert torch.equal(first(x), second(x))


def test_resizable_layer_loads_another_number_of_blocks(tmp_path):
    small, large = SparseLinear(8, 8, 0.25), SparseLinear(8, 8, 0.5)
    ds.save_safetensors(small, tmp_path / "m")
    with pytest.raises(ValueError, match=r"the layer holds .* got .*nnz=16"):
        ds.load_safetensors(large, tmp_path / "m")
    large.resizable = True
    ds.load_safetensors(large, tmp_path / "m")
    assert torch.equal(large.to_dense(), small.to_dense())


def check_rejected(model, path, message):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message) as error:
        ds.load_safetensors(model, path)
    assert "\n" not in str(error.value)
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"density": 0.5}, r"'also': the layer holds .*nnz=160.* got .*nnz=80"),
        (
            {"block": 8},
            r"'layer.attention.._proj' has blocks of 4 in the file and of 8 in the model",
        ),
        (
            {"hidden": 64},
            r"'layer.linear1' has the shape \[32, 16\] in the file, \[64, 16\] in the model",
        ),
        (
            {"dtype": torch.float64},
            r"is torch.float32 \[.*\] in the file, torch.float64 \[.*\] in the model",
        ),
    ],
)
def test_another_model_raises(tmp_path, changes, message):
    ds.save_safetensors(Model(), tmp_path / "m")
    check_rejected(Model(**changes), tmp_path / "m", message)


def test_wrong_keys_and_shapes_are_named(tmp_path):
    path = tmp_path / "m"
    ds.save_safetensors(nn.Sequential(SparseLinear(8, 8, 0.5), nn.Linear(8, 2)), path)
    check_rejected(nn.Sequential(SparseLinear(8, 8, 0.5)), path, "'1.bias' is only in the file")
    other = nn.Sequential(SparseLinear(8, 8, 0.5), nn.Linear(8, 2, bias=False))
    check_rejected(other, path, "'1.bias' is only in the file")
    other = nn.Sequential(SparseLinear(8, 8, 0.5), nn.Linear(8, 3))
    check_rejected(
        other, path, r"'1.(weight|bias)' is torch.float32 \[2.*\] in the file, torch.float32 \[3"
    )
    check_rejected(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)),
        path,
        "'0' is a sparse layer in the file, the model has a Linear there",
    )
    ds.save_safetensors(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), path)
    check_rejected(
        nn.Sequential(SparseLinear(8, 8, 0.5), nn.Linear(8, 2)), path, "'0' is not sparse in"
    )


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file_raises(tmp_path, keep):
    path = tmp_path / "m"
    ds.save_safetensors(Model(), path)
    path.write_bytes(path.read_bytes()[:keep])
    check_rejected(Model(), path, "m is truncated or no safetensors file")


def test_file_of_torch_save_raises(tmp_path):
    torch.save(Model().state_dict(), tmp_path / "m.pt")
    check_rejected(Model(), tmp_path / "m.pt", "m.pt is a file of torch.save, which may hold code")


def rewritten(path, change_tensors=lambda t: None, change_header=lambda h: None):
    with safetensors.safe_open(path, framework="pt") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change_tensors(tensors)
    change_header(header)
    save_file(tensors, path, header)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["packed"].fill_(255),
        lambda t: t["packed"].fill_(254),
        lambda t: t.update(packed=t["packed"].int()),
        lambda t: t.update(packed=t["packed"][:-1]),
        lambda t: t.update(packed=t["packed"].repeat(2)),
        lambda t: t.update(values=t["values"][1:]),
        lambda t: t.update(packed=t["packed"][:0], values=t["values"][:0]),
    ],
)
@pytest.mark.parametrize(("form", "density"), [("mask", 0.5), ("gaps", 0.0625)])
def test_damaged_pattern_raises(tmp_path, change, form, density):
    path = tmp_path / "m"
    ds.save_safetensors(SparseLinear(8, 8, density), path)

    def packed_changed(tensors):
        tensors["packed"] = tensors.pop(form)
        change(tensors)
        tensors[form] = tensors.pop("packed")

    rewritten(path, packed_changed)
    check_rejected(SparseLinear(8, 8, density), path, "the pattern of '' (is damaged|does not fit)")


def test_mask_with_extra_bits_raises(tmp_path):
    path = tmp_path / "m"
    layer = SparseLinear(6, 6, pattern=ds.SparsePattern.full((6, 6)))
    ds.save_safetensors(layer, path)
    rewritten(path, lambda t: t["mask"].copy_(torch.tensor([255, 255, 255, 255, 240])))
    check_rejected(layer, path, "expected a mask with 36 blocks of 36")


@pytest.mark.parametrize(
    ("density", "block", "dtype", "most"),
    [
        (0.1, 1, torch.float32, 0.14),
        (0.1, 16, torch.float32, 0.105),
        (0.1, 1, torch.bfloat16, 0.08),
        (0.5, 1, torch.float32, 0.54),
        (0.01, 1, torch.float32, 0.013),
    ],
)
def test_files_are_small(tmp_path, density, block, dtype, most):
    ds.save_safetensors(nn.Linear(768, 3072, bias=False), tmp_path / "dense")
    layer = SparseLinear(768, 3072, density, block, bias=False, dtype=dtype)
    ds.save_safetensors(layer, tmp_path / "sparse")
    size = (tmp_path / "sparse").stat().st_size
    assert size < most * (tmp_path / "dense").stat().st_size
    again = SparseLinear(768, 3072, density, block, bias=False, dtype=dtype)
    ds.load_safetensors(again, tmp_path / "sparse")
    assert torch.equal(again.to_dense(), layer.to_dense())


def test_foreign_metadata_raises(tmp_path):
    path = tmp_path / "m"
    layer = SparseLinear(8, 8, 0.5)
    ds.save_safetensors(layer, path)
    rewritten(path, change_header=lambda h: h.update(version="3"))
    check_rejected(layer, path, "has format version 3, this dynsparse reads version 2")
    rewritten(path, change_header=lambda h: h.update(version="2", layers="{"))
    check_rejected(layer, path, "m is damaged: its metadata cannot be read")
    save_file(layer.state_dict(), path)
    check_rejected(layer, path, "was not written by save_safetensors")


def test_missing_folders_and_unsupported_models(tmp_path):
    with pytest.raises(FileNotFoundError):
        ds.load_safetensors(Model(), tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        ds.save_safetensors(Model(), tmp_path / "no" / "where")
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got dict"):
        ds.save_safetensors({}, tmp_path / "m")
    with pytest.raises(TypeError, match="must map strings to strings, got 'step': 1"):
        ds.save_safetensors(Model(), tmp_path / "m", {"step": 1})

    class Odd(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(TypeError, match="'_extra_state' of the model's state is dict"):
        ds.save_safetensors(Odd(2, 2), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
