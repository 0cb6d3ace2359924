"""DeepR, MEST, Top-KAST and gradient starts, compared with hand-computed cases."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import dynsparse as ds
from dynsparse import SparsePattern
from dynsparse.nn import SparseEmbedding, SparseLinear
from dynsparse.nn.active_set import ActiveSet
from dynsparse.training import ConstantSchedule, GradientStep, MagnitudeGradient


def layer_of(values, flat, shape=(2, 3)):
    pattern = SparsePattern.from_flat(torch.tensor(flat), shape=shape)
    layer = SparseLinear(shape[1], shape[0], pattern=pattern, bias=False)
    with torch.no_grad():
        layer.values.copy_(torch.tensor(values))
    return layer


def backward(layer, gradient):
    """Give the weight the dense gradient `gradient` [out, in]."""
    layer.zero_grad()
    (layer(torch.eye(gradient.shape[1])) * gradient.t()).sum().backward()


def test_deepr_drops_weights_that_change_sign():
    layer = layer_of([1.0, -1.0, 0.1, -0.1], [0, 1, 2, 3])
    trainer = ds.DeepR(
        layer, torch.optim.SGD(layer.parameters(), lr=1.0), total_steps=9, l1=0.0, seed=1
    )
    assert trainer.signs[""].tolist() == [1, -1, 1, -1]
    # The weights become 0.5, -0.5, -0.4, 0.4: the last two change sign.
    backward(layer, torch.tensor([[0.5, -0.5, 0.5], [-0.5, 9.0, 9.0]]))
    rewiring = trainer.step()[""]
    assert rewiring.dropped.tolist() == [2, 3]
    assert layer.pattern.flat.tolist() == [0, 1, 4, 5]
    assert layer.values.tolist() == [0.5, -0.5, 0.0, 0.0]
    assert trainer.signs[""][:2].tolist() == [1, -1]
    assert set(trainer.signs[""].tolist()) <= {1, -1}
    backward(layer, torch.zeros(2, 3))
    assert trainer.step() is None  # zero has crossed nothing


def test_deepr_applies_l1_and_noise():
    layer = layer_of([1.0, -1.0], [0, 5])
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    trainer = ds.DeepR(layer, optimizer, total_steps=99, update_interval=50, l1=0.2)
    backward(layer, torch.zeros(2, 3))
    trainer.step()
    assert layer.values.tolist() == pytest.approx([0.9, -0.9])
    big = SparseLinear(100, 100, density=1.0)
    before = big.values.detach().clone()
    optimizer = torch.optim.SGD(big.parameters(), lr=0.5)
    trainer = ds.DeepR(big, optimizer, total_steps=99, update_interval=50, l1=0, temperature=0.04)
    backward(big, torch.zeros(100, 100))
    trainer.step()
    noise = big.values.detach() - before
    assert float(noise.std()) == pytest.approx(math.sqrt(2 * 0.5 * 0.04), rel=0.05)
    assert abs(float(noise.mean())) < 0.01


def test_deepr_uses_the_sum_of_a_block():
    pattern = SparsePattern.from_flat(torch.tensor([0, 1]), shape=(2, 6), block_size=2)
    layer = SparseLinear(6, 2, pattern=pattern, bias=False)
    with torch.no_grad():
        layer.values.fill_(1.0)
    trainer = ds.DeepR(layer, torch.optim.SGD(layer.parameters(), lr=1.0), total_steps=9, l1=0)
    gradient = torch.zeros(2, 6)
    gradient[0, :2] = 2.5  # block 0: -1.5, -1.5, 1, 1
    gradient[0, 2:4] = 1.5  # block 1: -0.5, -0.5, 1, 1
    backward(layer, gradient)
    assert trainer.step()[""].dropped.tolist() == [0]


def test_mest_score():
    values = nn.Parameter(torch.tensor([3.0, -1.0, 0.5]))
    with pytest.raises(RuntimeError, match=r"call trainer\.step\(\) after loss\.backward\(\)"):
        MagnitudeGradient(1.0)(values)
    assert MagnitudeGradient(0.0)(values).tolist() == [3, 1, 0.5]
    values.grad = torch.tensor([0.0, 0.0, -4.0])
    assert MagnitudeGradient(0.5)(values).tolist() == [3, 1, 2.5]
    blocks = nn.Parameter(torch.ones(1, 2, 2))
    blocks.grad = torch.full((1, 2, 2), -2.0)
    assert MagnitudeGradient(0.5)(blocks).tolist() == [8]


def test_mest_keeps_weights_with_large_gradients():
    layer = layer_of([3.0, -1.0, 0.5, 2.0], [0, 1, 2, 3])
    trainer = ds.MEST(
        layer, torch.optim.SGD(layer.parameters(), lr=1e-9), gradient_weight=0.5,
        schedule=ConstantSchedule(9, 1, 0.25), seed=0,
    )  # fmt: skip
    backward(layer, torch.tensor([[0.0, 0.0, -4.0], [0.0, 0.0, 0.0]]))
    assert trainer.step()[""].dropped.tolist() == [1]


def test_gradient_step():
    layer = layer_of([4.0, 1.0, 2.0, -3.0], [0, 2, 3, 5])
    trainer = ds.RigL(
        layer, torch.optim.SGD(layer.parameters(), lr=1e-3), initial_value=GradientStep(10),
        schedule=ConstantSchedule(9, 1, 0.5),
    )  # fmt: skip
    backward(layer, torch.tensor([[0.0, 7.0, 0.0], [0.0, -5.0, 0.0]]))
    trainer.step()
    assert layer.pattern.flat.tolist() == [0, 1, 4, 5]
    assert layer.values.tolist() == pytest.approx([4, -0.07, 0.05, -3])


def test_gradient_start_with_random_growth():
    layer = layer_of([4.0, 1.0, 2.0, -3.0], [0, 2, 3, 5])
    trainer = ds.SET(
        layer, torch.optim.SGD(layer.parameters(), lr=1e-3), initial_value=GradientStep(),
        schedule=ConstantSchedule(9, 1, 0.5), seed=0,
    )  # fmt: skip
    backward(layer, torch.tensor([[0.0, 7.0, 0.0], [0.0, -5.0, 0.0]]))
    trainer.step()
    assert layer.values.tolist() == pytest.approx([4, -0.007, 0.005, -3])


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 12)])
def test_active_set_equals_dense(b, shape, generator):
    layer = SparseLinear(12, 8, 0.5, b, generator=generator, dtype=torch.float64)
    slots = torch.arange(0, layer.pattern.nnz, 3)
    layer.active = ActiveSet(layer.pattern, slots, layer.values.device)
    chosen = torch.zeros(layer.pattern.nnz, dtype=torch.float64)
    chosen[slots] = 1
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(*shape[:-1], 8, generator=generator, dtype=torch.float64)
    mask = layer.pattern.to_dense(
        chosen.view(-1, *[1] * (layer.values.dim() - 1)).expand_as(layer.values)
    )
    weight = (layer.to_dense().detach() * mask).requires_grad_()
    y = layer(x)
    torch.testing.assert_close(y, nn.functional.linear(x, weight, layer.bias))
    found = torch.autograd.grad(y, (x, layer.values, layer.bias), dy)
    expected = torch.autograd.grad(
        nn.functional.linear(x, weight, layer.bias), (x, weight, layer.bias), dy
    )
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], layer.pattern.values_of(expected[1]))  # all of B
    torch.testing.assert_close(found[2], expected[2])


def test_active_set_under_autocast_and_in_float32():
    layer = SparseLinear(16, 8, 0.5)
    slots = torch.arange(0, layer.pattern.nnz, 2)
    layer.active = ActiveSet(layer.pattern, slots, layer.values.device)
    x = torch.randn(4, 16, requires_grad=True)
    exact = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(y.float(), exact, atol=0.05, rtol=0.05)


def test_new_pattern_removes_the_active_set():
    layer = SparseLinear(8, 8, 0.5)
    layer.active = ActiveSet(layer.pattern, torch.arange(3), layer.values.device)
    layer.set_pattern(SparsePattern.random((8, 8), nnz=32))
    assert layer.active is None
    for slots in ([0, 32], [1, 0], [2, 2], [-1, 0]):
        with pytest.raises(ValueError, match=r"sorted, distinct and within \[0, 32\)"):
            ActiveSet(layer.pattern, torch.tensor(slots), layer.values.device)


def test_topkast_by_hand():
    layer = layer_of([4.0, 1.0, 2.0, -3.0], [0, 2, 3, 5])
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    trainer = ds.TopKAST(
        layer, optimizer, forward_fraction=0.5, exploration=0.1,
        schedule=ConstantSchedule(9, 2, 0.5), seed=0,
    )  # fmt: skip
    # A holds 4 and -3; D = 2 / 6.
    assert layer(torch.eye(3)).t().tolist() == [[4, 0, 0], [0, 0, -3]]
    backward(layer, torch.zeros(2, 3))
    trainer.step()
    assert layer.values.tolist() == pytest.approx([3.6, 0.7, 1.4, -2.7])
    # 0.7 becomes 5.7, the largest: it comes into A. One of the two outside A leaves, the smallest.
    backward(layer, torch.tensor([[0.36, 0.0, -5.0], [0.0, 0.0, 0.0]]))
    rewiring = trainer.step()[""]
    assert rewiring.dropped.tolist() == [2]
    assert layer.pattern.flat[layer.active.slots].tolist() == [0, 2]
    trained = layer(torch.eye(3)).t()
    rewirings = trainer.shrink()
    assert list(rewirings) == [""]
    assert layer.active is None
    assert layer.pattern.flat.tolist() == [0, 2]
    assert len(layer.values) == 2
    assert torch.equal(layer(torch.eye(3)).t(), trained)


def test_topkast_updates_the_active_set_without_exploration():
    layer = layer_of([4.0, 1.0, 2.0, -3.0], [0, 2, 3, 5])
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    trainer = ds.TopKAST(
        layer, optimizer, exploration=0, total_steps=9, update_interval=1, drop_fraction=0.01
    )
    backward(layer, torch.tensor([[0.0, 0.0, -9.0], [0.0, 0.0, 0.0]]))
    assert trainer.step() is None
    assert layer.active.slots.tolist() == [0, 1]


def test_topkast_rejects_embedding_tables():
    model = nn.Sequential(SparseEmbedding(10, 4, 0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(TypeError, match="layer '0' is an embedding table"):
        ds.TopKAST(model, optimizer, total_steps=9)


@pytest.mark.parametrize(("gradient_weight", "changed"), [(0.01, ["0"]), (0, ["0", "1"])])
def test_mest_keeps_the_pattern_of_a_layer_without_gradient(gradient_weight, changed):
    model = nn.ModuleList([SparseLinear(8, 8, 0.4), SparseLinear(8, 8, 0.4)])
    trainer = ds.MEST(
        model, torch.optim.SGD(model.parameters(), 0.1), total_steps=9, update_interval=1,
        gradient_weight=gradient_weight,
    )  # fmt: skip
    model[0](torch.randn(4, 8)).sum().backward()
    assert list(trainer.step()) == changed


@pytest.mark.parametrize("made_for_averaging", [True, False])
def test_averages_compute_with_the_active_weights_of_topkast(made_for_averaging):
    model = nn.Sequential(SparseLinear(16, 24, 0.4), nn.ReLU(), SparseLinear(24, 8, 0.4))
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    average = None if made_for_averaging else copy.deepcopy(model)
    trainer = ds.TopKAST(model, optimizer, total_steps=20, update_interval=2, forward_fraction=0.3)
    if average is None:
        average = AveragedModel(model).module
    else:
        ds.nn.follow_patterns(average, model)
    x = torch.randn(5, 16)
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        trainer.step()
        with torch.no_grad():
            for own, other in zip(average.parameters(), model.parameters(), strict=True):
                own.copy_(other)
        assert torch.equal(average(x), model(x))
    trainer.shrink()
    assert average[0].active is None
