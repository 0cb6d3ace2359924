"""Dropout that redraws its mask in backward: distribution, gradient and seeds."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels_of import ISAS, with_library
from torch.utils.checkpoint import checkpoint

from dynsparse._core import native
from dynsparse.nn import Dropout
from dynsparse.ops.dropout import dropout

compiled = pytest.mark.skipif(native.load() is None, reason="no compiled kernels")


@given(
    shape=st.lists(st.integers(0, 40), max_size=3),
    rate=st.sampled_from([0.1, 0.5, 0.9]),
    turned=st.booleans(),
)
def test_outputs_and_gradients_use_the_same_mask(shape, rate, turned):
    x = torch.rand(shape) + 1
    x = (x.transpose(0, -1) if turned and shape else x).requires_grad_()
    y = dropout(x, rate)
    assert y.shape == x.shape
    kept = y != 0
    torch.testing.assert_close(y, torch.where(kept, x / (1 - rate), 0.0))
    dy = torch.randn(y.shape)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(dx, torch.where(kept, dy / (1 - rate), 0.0))


@pytest.mark.parametrize("rate", [1e-4, 0.1, 0.5, 0.999])
def test_fraction_of_dropped_entries(rate):
    n = 4_000_000
    zeros = int((dropout(torch.ones(n), rate) == 0).sum())
    assert abs(zeros - n * rate) < 6 * (n * rate * (1 - rate)) ** 0.5


def test_masks_are_independent():
    n = 1 << 20
    first = (dropout(torch.ones(n), 0.5) == 0).double() - 0.5
    second = (dropout(torch.ones(n), 0.5) == 0).double() - 0.5
    bound = 6 * 0.25 * n**0.5
    assert abs(float(first @ second)) < bound
    for shift in (1, 2, 4, 8, 16, 17, 32, 64, 128, 784, 8192, 16384):
        assert abs(float(first[shift:] @ first[:-shift])) < bound
    runs = np.diff(np.flatnonzero(np.diff(first.numpy())))
    assert runs.mean() == pytest.approx(2, abs=0.02)  # as for a fair coin


def test_torch_generator_determines_the_mask():
    x = torch.ones(1000)
    torch.manual_seed(3)
    first, second = dropout(x, 0.5), dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(dropout(x, 0.5), first)
    assert torch.equal(dropout(x, 0.5), second)
    assert not torch.equal(first, second)


@compiled
def test_mask_is_equal_for_any_number_of_threads():
    x = torch.rand(300, 1000)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        results.append(dropout(x, 0.3))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@compiled
def test_instruction_sets_agree():
    def draw():
        torch.manual_seed(2)
        return dropout(torch.rand(70001) + 1, 0.3)

    first, *others = (with_library(isa, draw) for isa in ISAS)
    assert all(torch.equal(first, other) for other in others)


def test_checkpointing_redraws_the_same_mask():
    x = torch.ones(500, requires_grad=True)
    y = checkpoint(lambda x: dropout(x, 0.5).square(), x, use_reentrant=False)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, torch.where(y > 0, 8.0, 0.0))


def test_second_derivatives():
    x = torch.rand(20, requires_grad=True)
    y = dropout(x, 0.5)
    (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(dx.sum(), x)
    torch.testing.assert_close(second, 6 * y * 4 * (y != 0) / 1.0)


def test_evaluation_and_rates_0_and_1():
    x = torch.rand(10)
    assert dropout(x, 0.5, training=False) is x
    assert dropout(x, 0.0) is x
    assert torch.equal(dropout(x, 1.0), torch.zeros(10))
    assert dropout(torch.ones(10, dtype=torch.float64), 0.5).dtype == torch.float64
    module = Dropout(0.5)
    assert not torch.equal(module(x), module(x))
    assert torch.equal(module.eval()(x), x)
    inplace = Dropout(0.5, inplace=True)
    assert inplace(x) is x


def test_compile_uses_torch_dropout():
    run = torch.compile(lambda x: dropout(x, 0.5).sum(), backend="aot_eager", fullgraph=True)
    x = torch.ones(2000, requires_grad=True)
    run(x).backward()
    assert set(x.grad.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_bad_rates_raise(rate):
    with pytest.raises(ValueError, match=r"dropout must be a number in \[0, 1\], got"):
        dropout(torch.ones(3), rate)
