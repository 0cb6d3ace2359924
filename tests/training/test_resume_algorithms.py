"""Every algorithm resumes bit for bit, also after layers changed their size."""

import copy

import pytest
import torch
from tiers import algorithms
from torch import nn

import dynsparse as ds
from dynsparse import SparsePattern
from dynsparse.nn import SparseLinear
from dynsparse.training import (
    CheckpointError,
    GradientStep,
    Telemetry,
    load_checkpoint,
    save_checkpoint,
)

TIMES = {"total_steps": 40, "update_interval": 4}

ALGORITHMS = {
    "static": lambda m, o: ds.Static(m, o),
    "set": lambda m, o: ds.SET(m, o, **TIMES),
    "rigl": lambda m, o: ds.RigL(m, o, **TIMES, initial_value=GradientStep()),
    "rigl-global": lambda m, o: ds.RigL(m, o, **TIMES, budget="global"),
    "snfs": lambda m, o: ds.SNFS(m, o, **TIMES, window=6),
    "snfs-dense": lambda m, o: ds.SNFS(m, o, **TIMES, window=None),
    "mest": lambda m, o: ds.MEST(m, o, **TIMES),
    "mest-soft": lambda m, o: ds.MEST(m, o, **TIMES, soft_memory_bound=True),
    "gmp": lambda m, o: ds.GMP(m, o, **TIMES, final_density=0.1),
    "gmp-global": lambda m, o: ds.GMP(m, o, **TIMES, final_density=0.1, scope="global"),
    "granet": lambda m, o: ds.GraNet(m, o, **TIMES, final_density=0.1),
    "topkast": lambda m, o: ds.TopKAST(m, o, **TIMES),
    "deepr": lambda m, o: ds.DeepR(m, o, total_steps=40, l1=0.05, temperature=1e-5),
}


def make(name, seed):
    g = torch.Generator().manual_seed(3)
    model = nn.Sequential(
        SparseLinear(12, 16, density=0.4, generator=g),
        nn.Tanh(),
        SparseLinear(16, 8, density=0.5, generator=g, block_size=1),
    )
    torch.manual_seed(seed)  # of the generator that random growth makes for itself
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return model, ALGORITHMS[name](model, optimizer)


def run(model, trainer, steps, data):
    for _ in range(steps):
        x = torch.randn(8, 12, generator=data)
        trainer.optimizer.zero_grad()
        model(x).square().mean().backward()
        trainer.step()


def compare(model, trainer, again, other):
    assert (other.steps, other.updates) == (trainer.steps, trainer.updates)
    for name, layer in trainer.layers.items():
        assert other.layers[name].pattern == layer.pattern
        assert (layer.active is None) == (other.layers[name].active is None)
        if layer.active is not None:
            assert layer.active.pattern == other.layers[name].active.pattern
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
        for key, state in trainer.optimizer.state[p].items():
            assert torch.equal(state, other.optimizer.state[q][key])


@pytest.mark.parametrize("at", [8, 17])  # 8 is an update step
@pytest.mark.parametrize("name", algorithms(ALGORITHMS))
def test_resume_is_exact(name, at, tmp_path):
    model, trainer = make(name, 11)
    telemetry = Telemetry(trainer)
    data = torch.Generator().manual_seed(1)
    run(model, trainer, at, data)
    save_checkpoint(
        tmp_path / "state", model=model, optimizer=trainer.optimizer, trainer=trainer,
        generators={"data": data}, extra={"telemetry": telemetry.state_dict()},
    )  # fmt: skip
    run(model, trainer, 31 - at, data)
    again, other = make(name, 99)
    run(again, other, 5, torch.Generator().manual_seed(7))  # a trainer that has already worked
    watching = Telemetry(other)
    extra = load_checkpoint(
        tmp_path / "state", model=again, optimizer=other.optimizer, trainer=other,
        generators={"data": data},
    )  # fmt: skip
    watching.load_state_dict(extra["telemetry"])
    assert other.steps == at
    run(again, other, 31 - at, data)
    compare(model, trainer, again, other)
    assert telemetry.figures() == watching.figures()


def test_state_dicts_resize_the_layers():
    model, trainer = make("gmp", 0)
    run(model, trainer, 20, torch.Generator().manual_seed(1))
    again, other = make("gmp", 0)
    parameters = [id(p) for p in again.parameters()]
    assert again[0].pattern.nnz > model[0].pattern.nnz
    again.load_state_dict(model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    other.load_state_dict(trainer.state_dict())
    assert [id(p) for p in again.parameters()] == parameters
    assert again[0].values.shape == model[0].values.shape
    run(model, trainer, 15, torch.Generator().manual_seed(2))
    run(again, other, 15, torch.Generator().manual_seed(2))
    compare(model, trainer, again, other)


def test_fixed_size_layer_rejects_another_number_of_blocks(tmp_path):
    model, trainer = make("gmp", 0)
    run(model, trainer, 20, torch.Generator().manual_seed(1))
    save_checkpoint(tmp_path / "state", model=model, optimizer=trainer.optimizer)
    plain, _ = make("rigl", 0)
    with pytest.raises(RuntimeError, match="must have the same shape, block size and number"):
        plain.load_state_dict(model.state_dict())
    with pytest.raises(CheckpointError, match=r"layer '0' was saved with \[out, in, block size"):
        load_checkpoint(tmp_path / "state", model=plain)
    for layer in (plain[0], plain[2]):
        layer.resizable = True
    load_checkpoint(tmp_path / "state", model=plain)
    x = torch.randn(4, 12)
    assert torch.equal(plain(x), model(x))


def test_resizable_layer_rejects_another_block_size(tmp_path):
    model, trainer = make("gmp", 0)
    save_checkpoint(tmp_path / "state", model=model, optimizer=trainer.optimizer)
    blocks = nn.Sequential(
        SparseLinear(12, 16, 0.4, 4), nn.Tanh(), SparseLinear(16, 8, density=0.5)
    )
    for layer in (blocks[0], blocks[2]):
        layer.resizable = True
    with pytest.raises(CheckpointError, match=r"= \[16, 12, 1, 77\], the model has \[16, 12, 4, 5"):
        load_checkpoint(tmp_path / "state", model=blocks)


def test_topkast_state_requires_its_model():
    model, trainer = make("topkast", 0)
    run(model, trainer, 9, torch.Generator().manual_seed(1))
    different, other = make("topkast", 5)
    different[0].set_pattern(SparsePattern.random((16, 12), nnz=77))
    with pytest.raises(ValueError, match="load the model that was saved with it first"):
        other.load_state_dict(trainer.state_dict())


def test_options_must_match():
    model, trainer = make("deepr", 0)
    other = ds.DeepR(model, trainer.optimizer, total_steps=40, l1=0.1, temperature=1e-5)
    with pytest.raises(ValueError, match=r"its l1 is 0\.05, here it is 0\.1"):
        other.load_state_dict(trainer.state_dict())
    model, trainer = make("snfs", 0)
    other = ds.SNFS(model, trainer.optimizer, **TIMES, window=7)
    with pytest.raises(ValueError, match="its window is 6, here it is 7"):
        other.load_state_dict(trainer.state_dict())
    model, trainer = make("gmp", 0)
    other = ds.GMP(model, trainer.optimizer, **TIMES, final_density=0.2)
    with pytest.raises(ValueError, match=r"its final_density is 0\.1, here"):
        other.load_state_dict(trainer.state_dict())
