"""Repair: blocks of a pruned model are trained to reproduce the outputs of the dense model."""

import copy

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.training import repair


class Block(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 24), nn.Linear(24, d)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, scale=1.0):
        return x + self.drop(self.down(self.up(self.norm(x)).relu())) * scale


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(12, 20, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for k, block in enumerate(self.blocks):
            x = block(x, 1.0 + k)
        return self.head(x)


def pruned(seed=0):
    torch.manual_seed(seed)
    dense = Chain().double()
    batches = [torch.randint(20, (4, 7)) for _ in range(4)]
    model = copy.deepcopy(dense)
    ds.sparsify(model, 0.3, start="wanda", calibration=batches, exclude=["head"], verbose=False)
    return model, dense, batches


def patterns(model):
    return {n: m.pattern for n, m in model.named_modules() if isinstance(m, SparseLinear)}


@torch.no_grad()
def error(block, x, z, scale):
    difference = sum((block(a, scale) - b).square().sum() for a, b in zip(x, z, strict=True))
    return float(difference / sum(b.square().sum() for b in z))


def test_repair_equals_masked_dense_training(capsys):
    model, dense, batches = pruned()
    reference = copy.deepcopy(model).eval()
    masks = {n: pattern.to_mask() for n, pattern in patterns(reference).items()}
    ds.densify(reference)
    before, states = patterns(model), copy.deepcopy(dense.state_dict())
    results = repair(model, dense, batches, epochs=3, lr=0.01)

    dense.eval()
    with torch.no_grad():
        x, z = ([m.embed(ids) for ids in batches] for m in (reference, dense))
    for k, (block, result) in enumerate(zip(reference.blocks, results, strict=True)):
        with torch.no_grad():
            z = [dense.blocks[k](a, 1.0 + k) for a in z]
        assert result.name == f"blocks.{k}"
        assert result.before == pytest.approx(error(block, x, z, 1.0 + k))
        optimizer = torch.optim.Adam(block.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(batches))
        for _ in range(3):
            for a, b in zip(x, z, strict=True):
                optimizer.zero_grad()
                (block(a, 1.0 + k) - b).square().mean().backward()
                for part in ("up", "down"):
                    block.get_submodule(part).weight.grad *= masks[f"blocks.{k}.{part}"]
                optimizer.step()
                schedule.step()
        assert result.after == pytest.approx(error(block, x, z, 1.0 + k))
        assert result.after < 0.8 * result.before
        with torch.no_grad():
            x = [block(a, 1.0 + k) for a in x]
    for name, pattern in patterns(model).items():
        assert pattern is before[name]
        layer = model.get_submodule(name)
        torch.testing.assert_close(layer.to_dense(), reference.get_submodule(name).weight)
    assert all(torch.equal(v, states[n]) for n, v in dense.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    layers = [m for m in model.modules() if isinstance(m, SparseLinear)]
    assert all(layer._state is None for layer in layers)  # one block at a time has an index
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"blocks.0: error {results[0].before:.4g} -> {results[0].after:.4g}"


def test_block_without_improvement_is_unchanged():
    model, dense, batches = pruned()
    before = copy.deepcopy(model.state_dict())
    results = repair(model, dense, batches, epochs=1, lr=1.0, verbose=False)
    assert all(result.after == result.before for result in results)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_interrupt_leaves_complete_blocks(monkeypatch):
    model, dense, batches = pruned()
    before = copy.deepcopy(model.state_dict())
    calls = []

    def interrupt(module, args):
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt

    model.blocks[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        repair(model, dense, batches, epochs=3, lr=0.01, verbose=False)
    for name, value in model.state_dict().items():
        changed = not torch.equal(value, before[name])
        assert changed is (name.startswith("blocks.0.") and not name.endswith(("rows", "cols")))


def test_frozen_parameters_do_not_change():
    model, dense, batches = pruned()
    for parameter in (*model.blocks[0].parameters(), model.blocks[1].up.values):
        parameter.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    results = repair(model, dense, batches, epochs=1, verbose=False)
    assert results[0].before == results[0].after
    frozen = [n for n in before if n.startswith("blocks.0.")] + ["blocks.1.up.values"]
    assert all(torch.equal(model.state_dict()[n], before[n]) for n in frozen)
    assert not torch.equal(model.blocks[1].down.values, before["blocks.1.down.values"])


def test_unsupported_models_raise():
    model, dense, batches = pruned()
    with pytest.raises(ValueError, match="none of the parameters of the blocks require a gradient"):
        repair(ds.freeze(copy.deepcopy(model)), dense, batches)
    with pytest.raises(ValueError, match="the model has no sparse layers: call"):
        repair(dense, dense, batches)
    other = copy.deepcopy(dense)
    del other.blocks[2]
    with pytest.raises(ValueError, match=r"must have the same blocks, got 3 blocks 'blocks.0', "):
        repair(model, other, batches)
    with pytest.raises(ValueError, match="before pruning, got one with the same patterns"):
        repair(model, model, batches)
    with pytest.raises(ValueError, match="epochs must be an integer of at least 1, got 0"):
        repair(model, dense, batches, epochs=0)
    with pytest.raises(ValueError, match=r"lr must be a number in \(0, 1\], got 2"):
        repair(model, dense, batches, lr=2)
    flat = ds.sparsify(nn.ModuleDict({"a": nn.Linear(4, 4)}), 0.5, verbose=False)
    flat.forward = lambda x: flat["a"](x)
    with pytest.raises(ValueError, match="the blocks of the model are not a chain"):
        repair(flat, ds.densify(copy.deepcopy(flat)), [torch.ones(2, 4)])
