"""quantize, QuantizedSparseLinear and their files."""

import copy
import io
import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import dynsparse as ds
from dynsparse.nn import QuantizedSparseLinear, SparseConv2d, SparseLinear

KINDS = ["float32", "int8"]


class Model(nn.Module):
    """A model with tied layers, attention, a dense layer and a convolution."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1)
        self.first = nn.Linear(16, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.second = nn.Linear(32, 32, bias=False)
        self.tied = nn.Linear(32, 32, bias=False)
        self.tied.weight = self.second.weight
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        x = self.first(self.conv(x).flatten(2).transpose(1, 2))
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(self.tied(self.second(x).relu()))


def made(block=8, density=0.5, seed=0):
    torch.manual_seed(seed)
    return ds.sparsify(Model(), density, block, exclude=["head"], verbose=False)


INPUT = torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("block", [1, 4, 8])
@pytest.mark.parametrize("activations", KINDS)
def test_quantized_model(block, activations):
    model = made(block)
    expected = model.eval()(INPUT)
    weights = {n: m.to_dense() for n, m in model.named_modules() if type(m) is SparseLinear}
    patterns = {n: m.pattern for n, m in model.named_modules() if type(m) is SparseLinear}
    assert ds.quantize(model.train(), activations) is model
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        assert type(layer) is QuantizedSparseLinear
        assert layer.pattern == patterns[name]
        assert layer.density == patterns[name].density
        step = weight.abs().amax(1) / 127
        assert torch.allclose(layer.scale, step)
        assert bool(((layer.to_dense() - weight).abs() <= step[:, None] * 0.5001).all())
        assert torch.equal(layer.weight, layer.to_dense())
    assert model.tied is model.second
    assert type(model.conv) is SparseConv2d
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    y = model(INPUT)
    error = (y - expected).norm() / expected.norm()
    assert 0 < error < 0.02
    # Blocks that are not multiples of 8 keep float32 activations.
    plain = ds.quantize(made(block))(INPUT)
    assert torch.equal(y, plain) == (activations == "float32" or block != 8)


def test_quantize_after_training_with_slots_in_any_order():
    torch.manual_seed(0)
    model = ds.sparsify(nn.Sequential(nn.Linear(32, 32)), 0.3, 8, verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = ds.SET(model, optimizer, total_steps=8, update_interval=2)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().sum().backward()
        trainer.step()
    weight, pattern = model[0].to_dense(), model[0].pattern
    layer = QuantizedSparseLinear.from_float(model[0])
    assert layer.pattern == pattern
    assert torch.allclose(layer.to_dense(), weight, atol=float(layer.scale.max()) * 0.5001)
    assert type(model[0]) is SparseLinear


def test_table_of_int8_layers():
    model = nn.Sequential(SparseLinear(16, 8, density=0.25, block_size=4), nn.Linear(8, 2))
    model[0].bias = None
    table = ds.nn.describe(ds.quantize(model), batch=4).splitlines()
    row = "0 8 x 16 4 0.2500 32 128 -> 32 int8 - -"
    assert table[1].split() == row.split()
    assert table[3] == "the model: 146 -> 50 parameters (34.2%)"


def test_excluded_layers_are_not_quantized():
    model = ds.quantize(made(), exclude=["attention", "fir*", "attention.q_proj"])
    kinds = {n: type(m) for n, m in model.named_modules()}
    assert kinds["first"] is kinds["attention.q_proj"] is SparseLinear
    assert kinds["second"] is QuantizedSparseLinear


@pytest.mark.parametrize("activations", KINDS)
@pytest.mark.parametrize("block", [1, 8])
def test_files(tmp_path, block, activations):
    model = ds.quantize(made(block), activations)
    ds.save_safetensors(model, tmp_path / "int8")
    loaded = ds.load_pretrained(Model(), tmp_path / "int8")
    assert not loaded.training
    assert torch.equal(loaded(INPUT), model(INPUT))
    assert loaded.tied is loaded.second
    assert loaded.second.activations == activations
    ds.save_safetensors(loaded, tmp_path / "again")
    tensors, again = load_file(tmp_path / "int8"), load_file(tmp_path / "again")
    assert tensors.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())
    values, scale = tensors["first.values"], tensors["first.scale"]
    assert values.dtype == torch.int8
    pattern = model.first.pattern
    assert values.shape == pattern.values_shape
    b = pattern.block_size
    rows = pattern.rows.long()[:, None] * b + torch.arange(b)
    weight = values.view(-1, b, b) * scale[rows][:, :, None]
    assert torch.equal(pattern.values_of(model.first.to_dense()), weight.view(values.shape))


def test_sizes_of_files(tmp_path):
    dense = nn.Sequential(nn.Linear(256, 1024))
    ds.save_safetensors(dense, tmp_path / "dense")
    # A byte per weight, at most a bit per block of the matrix, and a scale and a bias per row.
    for block, most in ((1, 0.064), (16, 0.034)):
        model = ds.sparsify(copy.deepcopy(dense), 0.1, block, verbose=False)
        ds.save_safetensors(ds.quantize(model), tmp_path / "int8")
        assert os.path.getsize(tmp_path / "int8") < most * os.path.getsize(tmp_path / "dense")


def rewrite(path, change):
    """Rewrite the file with changed tensors or metadata."""
    with safe_open(path, "pt") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors, header)
    save_file(tensors, path, header)


def test_bad_files(tmp_path):
    path = tmp_path / "m"
    ds.save_safetensors(ds.quantize(made()), path)
    good = path.read_bytes()

    def refused(match, change=lambda t, h: None, model=None):
        path.write_bytes(good)
        rewrite(path, change)
        model = Model() if model is None else model
        before = {n: type(m) for n, m in model.named_modules()}
        with pytest.raises(ValueError, match=match) as error:
            ds.load_pretrained(model, path)
        assert "\n" not in str(error.value)
        assert {n: type(m) for n, m in model.named_modules()} == before

    refused("need a finite float32 scale", lambda t, h: t.pop("first.scale"))
    refused("need a finite float32", lambda t, h: t.update({"first.scale": torch.ones(32).half()}))
    refused("need a finite float32", lambda t, h: t["first.scale"].fill_(float("nan")))
    refused("scale .out_features.", lambda t, h: t.update({"first.scale": torch.ones(31)}))
    refused("expected a mask with 5 blocks of 8, got 6", lambda t, h: t.update(
        {"first.values": t["first.values"][:-1].clone()}))  # fmt: skip
    for dense in (Model(), made()):
        refused("the file has int8 weights, .* into a float32 model", model=dense.bfloat16())

    def other(tensors, header):
        layers = json.loads(header["layers"])
        layers["first"]["activations"] = "int4"
        header["layers"] = json.dumps(layers)

    refused("expected activations of float32 or int8", other)
    path.write_bytes(good)
    with pytest.raises(ValueError, match=r"are int8.*load_pretrained"):
        ds.load_safetensors(made(), path)
    with pytest.raises(ValueError, match="QuantizedSparseLinear there"):
        ds.load_pretrained(ds.quantize(made()), path)


def test_states_copies_and_pickles():
    model, other = ds.quantize(made()), ds.quantize(made(seed=5))
    y = model(INPUT)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(INPUT), y)
    assert torch.equal(copy.deepcopy(model)(INPUT), y)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(INPUT), y)
    with torch.inference_mode():
        again = ds.quantize(made())
        assert torch.equal(again(INPUT), y)
    assert torch.equal(again(INPUT), y)


def test_training_raises():
    model = ds.quantize(made())
    with pytest.raises(RuntimeError, match="cannot be trained"):
        model.train()
    model.norm.requires_grad_(True)
    with pytest.raises(RuntimeError, match="has no gradients"):
        model(INPUT)
    with torch.no_grad():
        model(INPUT)
    sequence = ds.sparsify(nn.Sequential(nn.Linear(8, 8)), 0.5, verbose=False)
    ds.quantize(sequence)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    for train in (
        lambda: ds.RigL(sequence, optimizer, total_steps=5),
        lambda: ds.training.repair(sequence, nn.Sequential(nn.Linear(8, 8)), [torch.ones(1, 8)]),
    ):
        with pytest.raises(ValueError, match="are int8: train the float32 model, then quantize"):
            train()
    assert ds.freeze(sequence) is sequence


def test_bad_input():
    def refused(kind, match, model, *arguments, **named):
        before = {n: type(m) for n, m in model.named_modules()} if named.pop("same", True) else None
        with pytest.raises(kind, match=match) as error:
            ds.quantize(model, *arguments, **named)
        assert "\n" not in str(error.value)
        if before is not None:
            assert {n: type(m) for n, m in model.named_modules()} == before

    refused(TypeError, "model must be a torch.nn.Module", "model", same=False)
    refused(ValueError, "activations must be one of float32, int8", made(), "int4")
    refused(ValueError, "no sparse linear layers", Model())
    refused(ValueError, "are int8 already", ds.quantize(made()))
    with pytest.raises(ValueError, match="densify does not convert int8 layers"):
        ds.densify(ds.quantize(nn.Sequential(SparseLinear(8, 8))))
    refused(ValueError, "'nothing' matches no", made(), exclude=["nothing"])
    refused(TypeError, "name patterns", made(), exclude=[3])
    refused(ValueError, "from_float", SparseLinear(8, 8))
    refused(TypeError, r"'first' must have float32.*model.float", made().bfloat16())
    refused(ValueError, r"'first' must be on the CPU.*meta", made().to("meta"))
    hooked = made()
    hooked.first.register_forward_hook(lambda *_: None)
    refused(ValueError, "hooks", hooked)
    infinite = made()
    infinite.second.values.data[0] = float("inf")
    refused(ValueError, "NaN or infinite", infinite)
    with pytest.raises(TypeError, match="must be a linear layer, got a SparseConv2d"):
        QuantizedSparseLinear.from_float(made().conv)
    subset = made()
    optimizer = torch.optim.SGD(subset.parameters(), 0.1)
    trainer = ds.TopKAST(subset, optimizer, total_steps=10, forward_fraction=0.5)
    subset(INPUT).sum().backward()
    trainer.step()
    refused(ValueError, r"chosen by Top-KAST: call the trainer's shrink\(\) first", subset)
    trainer.shrink()
    ds.quantize(subset)
    model = ds.quantize(made())
    with pytest.raises(RuntimeError, match=r"float32 activations on the CPU, got torch\.bfloat16"):
        model.first(torch.ones(2, 16).bfloat16())
    with pytest.raises(RuntimeError, match="do not convert or move"):
        model.half().first(torch.ones(2, 16))


@pytest.mark.parametrize("activations", KINDS)
def test_exported_programs(activations):
    model = ds.quantize(ds.sparsify(nn.Sequential(nn.Linear(16, 16)), 0.5, 8, verbose=False))
    model[0].activations = activations
    x = torch.randn(3, 16)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for batch in (3, 5):
        x = torch.randn(batch, 16)
        assert torch.equal(program.module()(x), model(x))


@pytest.mark.slow
def test_compiled():
    model = ds.quantize(made())
    compiled = torch.compile(model, fullgraph=True)
    assert torch.allclose(compiled(INPUT), model(INPUT), atol=1e-5)
