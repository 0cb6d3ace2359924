"""Layers with every kind of kernel, and the choice among the kinds."""

import itertools

import pytest
import torch
from torch.nn.functional import linear as dense_linear

from dynsparse import SparsePattern, ops
from dynsparse._core import native
from dynsparse._core.processor import Processor
from dynsparse.nn import SparseLinear
from dynsparse.ops.linear import cost_table, cpu_dense, products
from dynsparse.ops.linear.cost_table import Layer

pytestmark = [
    pytest.mark.skipif(native.load() is None, reason="the compiled kernels are not built"),
    pytest.mark.usefixtures("restore_cost_table"),
]


@pytest.mark.parametrize("kind", products.KINDS)
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_layers_compute_the_same_with_every_kind(kind, block_size):
    layer = SparseLinear(48, 32, 0.4, block_size)
    x = torch.randn(2, 3, 48, requires_grad=True)
    with ops.use_kernel(kind):
        y = layer(x)
        y.square().sum().backward()
        expected_kind = kind if kind != "small" or block_size != 2 else layer.kernel(6)
        assert layer.kernel(6) == expected_kind
    weight = layer.to_dense().detach().requires_grad_()
    leaf = x.detach().clone().requires_grad_()
    reference = dense_linear(leaf, weight, layer.bias.detach())
    reference.square().sum().backward()
    torch.testing.assert_close(y, reference, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad, leaf.grad, rtol=1e-4, atol=1e-4)
    expected = layer.pattern.values_of(weight.grad)
    torch.testing.assert_close(layer.values.grad, expected, rtol=1e-4, atol=1e-4)


def test_masks_follow_the_pattern():
    layer = SparseLinear(40, 30, 0.5)
    x = torch.randn(2, 40)
    with ops.use_kernel("small"):
        layer(x)
        layer.set_pattern(SparsePattern.random((30, 40), nnz=layer.pattern.nnz))
        torch.testing.assert_close(layer(x), dense_linear(x, layer.to_dense(), layer.bias))


def test_dense_products_ignore_autocast():
    layer = SparseLinear(48, 32, 0.9)
    x = torch.randn(64, 48, requires_grad=True)
    with ops.use_kernel("dense"):
        y = layer(x).sum()
        with torch.autocast("cpu", torch.bfloat16):
            y.backward()
    torch.testing.assert_close(x.grad, layer.to_dense().sum(0).expand(64, 48))


def test_use_kernel_rejects_unknown_names_and_restores():
    with pytest.raises(
        ValueError, match="kind must be one of sparse, small, dense, blocks, got 'csr'"
    ):
        ops.use_kernel("csr").__enter__()
    layer = SparseLinear(64, 64, 0.01)
    with ops.use_kernel("dense"):
        assert layer.kernel(100) == "dense"
    assert layer.kernel(100) == "sparse"


@pytest.mark.parametrize("maker", ["GenuineIntel", "AuthenticAMD", "", "neon"])
def test_choice_switches_to_dense_with_density(monkeypatch, maker):
    monkeypatch.setattr(cost_table, "processor", lambda: Processor(maker, "", 25, frozenset()))
    monkeypatch.setattr(native, "supported_isas", lambda: (maker if maker == "neon" else "v3",))
    cost_table._active = cost_table.default_table()
    for block_size in (1, 4, 16, 64):
        total = (1024 // block_size) ** 2
        for backward in (False, True):
            kinds = [
                cost_table.choose(Layer(1024, 1024, total * i // 50, block_size), 1024, backward)
                for i in range(1, 51)
            ]
            assert kinds[0] == "sparse"
            assert kinds[-1] == "dense" or block_size > 1
            assert sum(a != b for a, b in itertools.pairwise(kinds)) <= 1


def test_dense_products_are_chosen_earlier_on_arm(monkeypatch):
    """Assumption: ARM loads fewer numbers per cycle for the same number of multiply-adds."""
    layer = Layer(1024, 1024, 300_000, 1)
    here = Processor("AuthenticAMD", "", 25, frozenset({"avx512f"}))
    monkeypatch.setattr(cost_table, "processor", lambda: here)
    costs = {}
    for isa in ("v4", "neon"):
        monkeypatch.setattr(native, "supported_isas", lambda isa=isa: (isa,))
        cost_table._active = cost_table.default_table()
        costs[isa] = [
            cost_table._cost(cost_table.active_table().costs, kind, layer, 512, False)
            for kind in ("sparse", "dense")
        ]
    assert costs["neon"][1] == costs["v4"][1]
    assert 1.2 < costs["neon"][0] / costs["v4"][0] < 1.34


def test_single_samples_use_masks_where_available(monkeypatch):
    layer = Layer(1024, 1024, 300_000, 1)
    monkeypatch.setattr(native, "expands_masks", lambda: True)
    assert cost_table.choose(layer, 1, False) == "small"
    assert cost_table.choose(layer._replace(nnz=10_000), 1, False) == "sparse"
    monkeypatch.setattr(native, "expands_masks", lambda: False)
    assert cost_table.choose(layer, 1, False) != "small"


def test_small_batch_kernels_are_not_used_for_large_batches(monkeypatch):
    monkeypatch.setattr(native, "expands_masks", lambda: True)
    layer = Layer(10, 320, 2_000, 1)
    for batch in (129, 512, 10_000):
        assert cost_table.choose(layer, batch, False) != "small"
        assert cost_table.choose(layer, batch, True) != "small"


def test_kernel_returns_the_name(monkeypatch):
    layer = SparseLinear(32, 32, 0.01)
    assert layer.kernel(64) == layer.kernel(64, backward=True) == "sparse"
    assert SparseLinear(32, 32, 0.5, dtype=torch.float64).kernel(64) == "torch"
    assert layer.kernel(0) == "sparse"
    monkeypatch.setattr(native, "load", lambda: None)
    assert layer.kernel(64) == "torch"


def test_cache_of_choices_is_bounded():
    layer = SparseLinear(32, 32, 0.5)
    for batch in range(1, 300):
        layer.kernel(batch)
    assert len(layer._state.index.choices[0]) <= products._MOST_CHOICES


def test_dense_products_after_inference_mode():
    cpu_dense.release_memory()
    layer = SparseLinear(64, 48, 0.9)
    x = torch.randn(70, 64)
    with ops.use_kernel("dense"):
        with torch.inference_mode():
            y = layer(x)
        again = layer(x)
        again.sum().backward()
    assert torch.equal(y, again)
    expected = x.sum(0).expand(48, 64)
    torch.testing.assert_close(
        layer.values.grad, layer.pattern.values_of(expected), rtol=1e-4, atol=1e-4
    )


def test_dense_products_with_another_default_dtype():
    layer = SparseLinear(64, 48, 0.9, dtype=torch.float32)
    x = torch.randn(70, 64)
    expected = x @ layer.to_dense().t() + layer.bias
    cpu_dense.release_memory()
    torch.set_default_dtype(torch.float64)
    try:
        with ops.use_kernel("dense"):
            torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    finally:
        torch.set_default_dtype(torch.float32)
