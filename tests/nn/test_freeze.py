"""freeze keeps outputs and reduces memory."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear

X = torch.randn(600, 32, generator=torch.Generator().manual_seed(1))


def build():
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32, bias=False), nn.GELU(), nn.Linear(32, 8)
    )


def trained(block_size=1, steps=8):
    torch.manual_seed(0)
    model = ds.sparsify(build(), 0.3, block_size, exclude=["4"], verbose=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trainer = ds.RigL(model, optimizer, total_steps=40, update_interval=3)
    train(model, trainer, steps)
    return model, trainer


def train(model, trainer, steps):
    for _ in range(steps):
        trainer.optimizer.zero_grad()
        model(X).square().mean().backward()
        trainer.step()


@pytest.mark.parametrize("block_size", [1, 8])
def test_outputs_are_equal_and_memory_is_lower(block_size):
    model, _ = trained(block_size)
    before, patterns = model(X).detach(), [model[i].pattern for i in (0, 2)]
    assert not model[0].pattern._is_row_major
    assert ds.freeze(model) is model
    after = model(X)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    assert not after.requires_grad
    assert not model.training
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    for i, pattern in zip((0, 2), patterns, strict=True):
        assert model[i].pattern == pattern
        # What `test_index_memory` finds to be 4 bytes per block.
        assert model[i].pattern._is_row_major
        assert model[i]._state.index.order is None


@pytest.mark.parametrize("block_size", [1, 8])
def test_files_copies_and_dense_layers(tmp_path, block_size):
    model, _ = trained(block_size)
    y = ds.freeze(model)(X)
    ds.save_safetensors(model, tmp_path / "m")
    assert torch.equal(ds.load_pretrained(build(), tmp_path / "m").eval()(X), y)
    assert torch.equal(copy.deepcopy(model)(X), y)
    assert torch.equal(pickle.loads(pickle.dumps(model))(X), y)
    other = ds.sparsify(build(), 0.3, block_size, exclude=["4"], verbose=False)
    for layer in (other[0], other[2]):
        layer.resizable = True
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.eval()(X), y)
    torch.testing.assert_close(ds.densify(model)(X), y, rtol=1e-5, atol=1e-6)


def test_only_relu_after_a_sparse_layer_is_in_place():
    shared = nn.ReLU()

    class Residual(nn.Sequential):
        def forward(self, x):
            y = self[0](x)
            return y + self[1](y)

    model = nn.Sequential(
        shared,
        SparseLinear(8, 8, 0.5),
        shared,
        nn.Linear(8, 8),
        nn.ReLU(),
        Residual(SparseLinear(8, 8, 0.5), nn.ReLU()),
    )
    x = torch.randn(4, 8)
    before, y = x.clone(), model(x).detach()
    ds.freeze(model)
    torch.testing.assert_close(model(x), y)
    assert torch.equal(x, before)
    in_place = [model[i].inplace for i in (0, 2, 4)]
    assert in_place == [False, True, False]
    assert not model[5][1].inplace


def test_frozen_model_can_be_trained():
    model, trainer = trained(steps=10)
    straight, going_on = trained(steps=10)
    ds.freeze(model)
    with pytest.raises(RuntimeError, match="does not require grad"):
        model(X).sum().backward()
    model.train().requires_grad_()
    train(model, trainer, 12)
    train(straight, going_on, 12)
    assert trainer.updates == going_on.updates > 3
    for i in (0, 2):
        assert model[i].pattern == straight[i].pattern
        torch.testing.assert_close(model[i].to_dense(), straight[i].to_dense())


def test_other_layers_and_active_subsets():
    conv = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU())
    ds.sparsify(conv, 0.4, verbose=False)
    x = torch.randn(2, 8, 5, 5)
    y = conv(x).detach()
    torch.testing.assert_close(ds.freeze(conv)(x), y)
    model = ds.sparsify(build(), 0.4, exclude=["4"], verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainer = ds.TopKAST(model, optimizer, total_steps=20, update_interval=2, forward_fraction=0.5)
    train(model, trainer, 3)
    y = model(X).detach()
    assert model[0].active is not None
    torch.testing.assert_close(ds.freeze(model)(X), y)


def test_unsupported_models_raise():
    with pytest.raises(ValueError, match="the model has no sparse layers"):
        ds.freeze(build())
    with pytest.raises(TypeError, match="model must be"):
        ds.freeze("model")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own
def test_compile_and_export(tmp_path):
    model, _ = trained(1)
    y = ds.freeze(model)(X)
    torch.testing.assert_close(torch.compile(model)(X), y, rtol=1e-5, atol=1e-6)
    program = torch.export.export(model, (X,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    torch.testing.assert_close(loaded(X[:7]), y[:7], rtol=1e-5, atol=1e-6)
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2")
    )
    compiled = torch._inductor.aoti_load_package(package)
    torch.testing.assert_close(compiled(X[:7]), y[:7], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("register", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_activation_keeps_its_hooks(register):
    model = nn.Sequential(ds.nn.SparseLinear(8, 8, 0.5), nn.ReLU())
    called = []
    getattr(model[1], f"register_{register}")(lambda *arguments: called.append(arguments))
    frozen = ds.freeze(model).requires_grad_()
    frozen(torch.randn(2, 8)).sum().backward()
    assert len(called) == 1
