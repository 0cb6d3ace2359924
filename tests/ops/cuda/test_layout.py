"""Kernels that scatter values and gather gradients for dense products equal torch's operators."""

import pytest
import torch
from cases import activations

from dynsparse import SparsePattern
from dynsparse.nn import SparseLinear
from dynsparse.ops.linear import LayerIndex
from dynsparse.ops.linear.cuda import dense

pytestmark = pytest.mark.usefixtures("interpreter")

SHAPES = {1: (30, 50), 2: (30, 50), 4: (36, 52), 5: (35, 25), 8: (64, 40), 16: (64, 48)}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def kernels(monkeypatch):
    """Switch the kernels on or off, and count their launches."""
    from dynsparse.ops.linear.cuda import launch

    made = []
    for name in ("lay_out", "collect"):
        own = getattr(launch, name)
        counted = lambda *args, name=name, own=own: made.append(name) or own(*args)  # noqa: E731
        monkeypatch.setattr(launch, name, counted)

    def use(which):
        monkeypatch.setattr(dense, "runs_triton", lambda device: which)
        return made

    return use


def passes(x, dy, values, p):
    return dense.forward(x, values, p, None), *dense.backward(dy, x, values, p, True, True)


def same(b, density, dtype, wide, kernels, layout="contiguous", shuffled=False):
    pattern = SparsePattern.random(SHAPES[b], density, block_size=b)
    if shuffled:
        pattern = SparsePattern._from_slots(pattern.flat[torch.randperm(pattern.nnz)], pattern)
    values = torch.randn(pattern.values_shape, dtype=torch.float32 if wide else dtype)
    p = LayerIndex(pattern.index, values)
    x, dy = (activations(6, n, dtype, layout) for n in reversed(SHAPES[b]))
    kernels(False)
    wanted = passes(x, dy, values, p)
    made = kernels(True)
    for own, other in zip(passes(x, dy, values, p), wanted, strict=True):
        assert torch.equal(own, other)
        assert own.dtype is other.dtype
    return made


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("b", SHAPES)
def test_every_block_and_type(b, dtype, layout, kernels):
    made = same(b, 0.4, dtype, False, kernels, layout)
    assert made == ["lay_out", "lay_out", "collect"]


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
@pytest.mark.parametrize("b", SHAPES)
def test_float32_values(b, dtype, kernels):
    same(b, 0.3, dtype, True, kernels)


@pytest.mark.parametrize("b", SHAPES)
def test_values_in_slots_of_any_order(b, kernels):
    made = same(b, 0.4, torch.float32, False, kernels, shuffled=True)
    assert made == ["lay_out", "lay_out", "collect"]


@pytest.mark.parametrize("density", [0.0, 0.01, 0.9, 1.0])
@pytest.mark.parametrize("b", [1, 4])
def test_empty_and_full_patterns(b, density, kernels):
    same(b, density, torch.float32, False, kernels)


@pytest.mark.parametrize("b", [1, 4, 16])
def test_panels_gather_only_their_entries(b, kernels, monkeypatch):
    shape = SHAPES[b]
    monkeypatch.setattr(dense, "PANEL_BYTES", 4 * shape[1] * b * 2)  # two block rows
    made = same(b, 0.4, torch.float32, False, kernels)
    assert made.count("collect") == -(-shape[0] // (2 * b))


def test_rows_longer_than_a_step(kernels, monkeypatch):
    from dynsparse.ops.linear.cuda import launch

    monkeypatch.setattr(launch, "_AT_ONCE", 8)
    same(4, 0.7, torch.bfloat16, True, kernels)
    same(1, 0.7, torch.float32, False, kernels)


def test_updated_pattern(off_cpu, kernels):
    kernels(True)
    layer = SparseLinear(48, 32, 0.3)
    x = torch.randn(6, 48)
    for _ in range(2):
        layer.values.grad = None
        y = layer(x)
        y.backward(torch.ones_like(y))
        torch.testing.assert_close(y, torch.nn.functional.linear(x, layer.to_dense(), layer.bias))
        gradient = x.sum(0).expand(32, 48)
        torch.testing.assert_close(layer.values.grad, layer.pattern.values_of(gradient))
        layer.set_pattern(SparsePattern.random((32, 48), nnz=layer.pattern.nnz))
