"""A layer trained on the tile machine equals the same layer on the CPU."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import dynsparse as ds
import popsparse
from popsparse import machine_profiles

TARGET = popsparse.Target.bow(tiles=12)


def pair(block_size=4, in_=32, out=48, **more):
    generator = torch.Generator().manual_seed(0)
    pattern = ds.SparsePattern.random((out, in_), 0.3, block_size=block_size, generator=generator)
    here = ds.nn.SparseLinear(in_, out, pattern=pattern, **more)
    there = ds.nn.SparseLinear(in_, out, pattern=pattern, target=TARGET, **more)
    there.load_state_dict(here.state_dict())
    return here, there


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_products_and_gradients(block_size, bias):
    here, there = pair(block_size, bias=bias)
    x = torch.randn(3, 5, 32)
    found = []
    for layer in (here, there):
        mine = x.clone().requires_grad_()
        y = layer(mine)
        y.square().sum().backward()
        found.append([y, mine.grad, *(p.grad for p in layer.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert set(machine_profiles(there)) == {"forward", "grad_input", "grad_weight"}
    for other in (here, nn.Sequential(there)):
        with pytest.raises(TypeError, match=r"a layer with a target, got S.*: pass one layer"):
            machine_profiles(other)


def test_rigl_training_equals_the_cpu():
    torch.manual_seed(0)
    x, wanted = torch.randn(16, 32), torch.randn(16, 8)
    losses = []
    for target in (None, TARGET):
        torch.manual_seed(1)
        model = nn.Sequential(
            ds.nn.SparseLinear(32, 48, density=0.3, block_size=4, target=target),
            nn.ReLU(),
            ds.nn.SparseLinear(48, 8, density=0.5, target=target),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        trainer = ds.RigL(model, optimizer, total_steps=12, update_interval=4)
        run = []
        for _ in range(12):
            loss = (model(x) - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            trainer.step()
            run.append(loss.item())
        losses.append((run, [layer.pattern for layer in (model[0], model[2])]))
    (cpu, patterns), (machine, theirs) = losses
    assert machine == pytest.approx(cpu, rel=1e-3)
    assert patterns == theirs


def test_half_and_other_batches():
    _, there = pair(dtype=torch.float16)
    for batch in (1, 3, 8, 2, 5, 6, 1):
        y = there(torch.ones(batch, 32, dtype=torch.float16))
        assert y.shape == (batch, 48)
    assert there(torch.ones(0, 32, dtype=torch.float16)).shape == (0, 48)


def test_copies_and_pickles():
    here, there = pair()
    x = torch.randn(4, 32)
    there(x)
    for other in (copy.deepcopy(there), pickle.loads(pickle.dumps(there))):
        assert other.target == TARGET
        torch.testing.assert_close(other(x), here(x), rtol=1e-4, atol=1e-4)


def test_bad_input():
    with pytest.raises(TypeError, match=r"such as popsparse\.Target\.bow\(\), got"):
        ds.nn.SparseLinear(8, 8, target="bow")
    with pytest.raises(TypeError, match=r"float16 and float32, got torch\.float64"):
        ds.nn.SparseLinear(8, 8, target=TARGET, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"expected an input \[\.\.\., 32\], got \[4, 31\]"):
        pair()[1](torch.randn(4, 31))


def test_target_without_backend_names_the_import():
    code = (
        "import sys, dynsparse as ds\n"
        "try:\n    ds.nn.SparseLinear(8, 8, target='bow')\n"
        "except TypeError as error:\n    print(error)\n"
        "assert 'popsparse' not in sys.modules\n"
        "import popsparse\n"
        "print(ds.nn.SparseLinear(8, 8, 0.5, target=popsparse.Target.bow(tiles=2)).kernel(8))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.startswith("target must be a target such as popsparse.Target.bow(), after `import")
    assert second == "tile machine"
