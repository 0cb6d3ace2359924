"""bfloat16 products against float64 products of the same bfloat16 operands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_of import needs_kernels
from torch import Tensor

from dynsparse._core import native
from dynsparse.ops.linear import LayerIndex, grad_input, grad_weight, linear
from dynsparse.ops.linear.cpu import KERNELS
from dynsparse.pattern import SparsePattern

bfloat16 = KERNELS["bfloat16"]

ISAS = [isa for isa in native.supported_isas() if isa in native.describe()["available"]]
pytestmark = pytest.mark.skipif(not ISAS, reason="the compiled kernels are not built")

BLOCK_SIZES = [1, 3, 4, 8, 16, 32, 48, 64, 128]
LOW = torch.bfloat16


@pytest.fixture(params=ISAS or ["none"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    library = native.load_isa(request.param)
    monkeypatch.setattr(native, "load", lambda: library)
    return request.param


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fresh tensors are full of NaN: an output element that is not written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def activations(shape: tuple[int, int], layout: str, generator: torch.Generator) -> Tensor:
    batch, features = shape
    if layout == "transposed":
        return torch.randn(features, batch, generator=generator).to(LOW).t()
    if layout == "sliced rows":
        return torch.randn(batch, features + 5, generator=generator).to(LOW)[:, 3 : features + 3]
    if layout == "sliced both":
        return torch.randn(2 * batch, 3 * features, generator=generator).to(LOW)[::2, ::3]
    if layout == "expanded":
        return torch.randn(1, features, generator=generator).to(LOW).expand(batch, features)
    return torch.randn(batch, features, generator=generator).to(LOW)


LAYOUTS = ["contiguous", "transposed", "sliced rows", "sliced both", "expanded"]


def close(got: Tensor, expected: Tensor, dtype: torch.dtype, terms: int) -> None:
    """Sums of `terms` products in float32, rounded once to `dtype`."""
    assert got.dtype is dtype
    assert got.shape == expected.shape
    assert got.is_contiguous()
    rounding = 2.0**-8 if dtype is LOW else 2.0**-22
    accumulated = 2e-6 * (terms + 4) ** 0.5
    torch.testing.assert_close(got.double(), expected, rtol=rounding, atol=accumulated)


def check(
    pattern: SparsePattern,
    x: Tensor,
    dy: Tensor,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    values = torch.randn(pattern.values_shape, generator=generator)
    # Float32 values that matrix units need not round.
    values = values.to(LOW).to(dtype)
    bias = torch.randn(pattern.shape[0], generator=generator).to(dtype)
    b = pattern.block_size
    (height, width), rows, cols = pattern.grid, pattern.rows.long(), pattern.cols.long()
    weight = torch.zeros(height, b, width, b, dtype=torch.float64)
    weight[rows, :, cols] = values.double().view(-1, b, b)
    weight = weight.view(pattern.shape)
    gradient = (dy.double().t() @ x.double()).view(height, b, width, b)[rows, :, cols]
    y = x.double() @ weight.t()
    p = LayerIndex(pattern.index, values)

    close(bfloat16.forward(x, values, p, None), y, LOW, pattern.shape[1])
    close(bfloat16.forward(x, values, p, bias), y + bias.double(), LOW, pattern.shape[1])
    for need_input, need_values in ((True, True), (True, False), (False, True), (False, False)):
        dbias = torch.empty(pattern.shape[0])
        dx, dvalues = bfloat16.backward(dy, x, values, p, need_input, need_values, dbias)
        close(dbias, dy.double().sum(0), torch.float32, len(x))
        assert (dx is not None) == need_input
        assert (dvalues is not None) == need_values
        if dx is not None:
            close(dx, dy.double() @ weight, LOW, pattern.shape[0])
        if dvalues is not None:
            close(dvalues, gradient.reshape(values.shape), dtype, len(x))


@needs_kernels
@given(
    block=st.sampled_from(BLOCK_SIZES),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    batch=st.one_of(st.integers(1, 20), st.integers(1, 300)),
    density=st.sampled_from([0.0, 0.02, 0.1, 0.3, 1.0]),
    x_layout=st.sampled_from(LAYOUTS),
    dy_layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from([torch.float32, LOW]),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=25)
def test_any_shape_pattern_and_stride(
    block: int,
    height: int,
    width: int,
    batch: int,
    density: float,
    x_layout: str,
    dy_layout: str,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (max(1, 2 * height // block) * block, max(1, 2 * width // block) * block)
    pattern = SparsePattern.random(shape, density, block_size=block, generator=generator)
    x = activations((batch, shape[1]), x_layout, generator)
    dy = activations((batch, shape[0]), dy_layout, generator)
    check(pattern, x, dy, dtype, generator)


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_each_instruction_set(isa: str, block: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(block)
    shape = (77, 131) if block == 1 else (7 * block, 11 * block)
    if block > 48:
        shape = (3 * block, 4 * block)
    pattern = SparsePattern.random(shape, 0.3, block_size=block, generator=generator)
    for batch in (1, 31, 64, 103, 290):
        x = activations((batch, shape[1]), "contiguous", generator)
        dy = activations((batch, shape[0]), "contiguous", generator)
        check(pattern, x, dy, dtype, generator)


@pytest.mark.parametrize("block", [1, 8, 32])
def test_empty_batch(isa: str, block: int) -> None:
    pattern = SparsePattern.random((64, 96), 0.3, block_size=block)
    values = torch.randn(pattern.values_shape)
    p = LayerIndex(pattern.index, values)
    x, dy = torch.zeros(0, 96, dtype=LOW), torch.zeros(0, 64, dtype=LOW)
    assert bfloat16.forward(x, values, p, None).shape == (0, 64)
    dx, dvalues = bfloat16.backward(dy, x, values, p, True, True)
    assert dx is not None
    assert dx.shape == (0, 96)
    assert dvalues is not None
    assert not dvalues.any()


def test_rounding_of_odd_values(isa: str) -> None:
    """NaN stays NaN, infinities stay, halves go to the even neighbour: as torch rounds."""
    odd = torch.tensor(
        [
            float("nan"),
            float("inf"),
            -float("inf"),
            3.4e38,
            1.00390625,
            1.01171875,
            -0.0,
            torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32).item(),
        ]
    )
    index = torch.arange(len(odd), dtype=torch.int32)
    pattern = SparsePattern(index, torch.zeros_like(index), shape=(len(odd), 1))
    values = torch.zeros(len(odd))
    p = LayerIndex(pattern.index, values)
    x = torch.zeros(3, 1, dtype=LOW)
    y = bfloat16.forward(x, values, p, odd)
    expected = odd.to(LOW).expand(3, -1)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("block", [1, 4, 16, 32, 64])
def test_operator_and_autocast_take_these_kernels(block: int, monkeypatch) -> None:
    """The layer's operator in bfloat16 equals the kernels, with float32 gradients of the values."""
    calls = []

    def counted(name):
        def kernel(*args):
            calls.append(name)
            return getattr(bfloat16, name)(*args)

        return kernel

    kernels = bfloat16._replace(forward=counted("forward"), backward=counted("backward"))
    monkeypatch.setitem(KERNELS, "bfloat16", kernels)
    generator = torch.Generator().manual_seed(0)
    pattern = SparsePattern.random((256, 512), 0.05, block_size=block, generator=generator)
    values = torch.randn(pattern.values_shape, generator=generator).to(LOW).float()
    values.requires_grad_()
    x = torch.randn(4, 32, 512, generator=generator).to(LOW).requires_grad_()
    y = linear(x, values, pattern)
    assert y.dtype is LOW
    y.sum().backward()
    assert calls == ["forward", "backward"]
    assert x.grad is not None
    assert x.grad.dtype is LOW
    assert values.grad is not None
    assert values.grad.dtype is torch.float32
    dy = torch.ones(128, 256, dtype=LOW)
    torch.testing.assert_close(x.grad.view(128, 512), grad_input(dy, values, pattern))
    torch.testing.assert_close(
        values.grad, grad_weight(dy, x.detach().view(128, 512), values, pattern)
    )
    calls.clear()
    with torch.autocast("cpu", dtype=LOW):
        again = linear(x.detach().float(), values, pattern)
    assert calls == ["forward"]
    torch.testing.assert_close(again, y.detach(), rtol=0, atol=0)


LESSER_UNIT = """
import torch
from dynsparse._core import native
from dynsparse.ops.linear import LayerIndex
from dynsparse.ops.linear.cpu import KERNELS
from dynsparse.pattern import SparsePattern

bfloat16 = KERNELS["bfloat16"]
g = torch.Generator().manual_seed(0)
for block, out in ((16, 160), (32, 160), (64, 192), (128, 256)):
    pattern = SparsePattern.random((out, 1024), 0.3, block_size=block, generator=g)
    values = torch.randn(pattern.values_shape, generator=g).bfloat16()
    p = LayerIndex(pattern.index, values)
    for batch in (1, 50, 131):
        x = torch.randn(batch, 1024, generator=g).bfloat16()
        dy = torch.randn(batch, out, generator=g).bfloat16()
        weight = pattern.to_dense(values).double()
        gradient = (dy.double().t() @ x.double()).view(out // block, block, 1024 // block, block)
        gradient = gradient[pattern.rows.long(), :, pattern.cols.long()]
        dx, dw = bfloat16.backward(dy, x, values, p, True, True)
        for got, expected in (
            (bfloat16.forward(x, values, p, None), x.double() @ weight.t()),
            (dx, dy.double() @ weight),
            (dw, gradient),
        ):
            torch.testing.assert_close(got.double(), expected, rtol=2.0**-8, atol=1e-4)
print(native.bfloat16_unit())
"""


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["0", "1"])
def test_less_than_the_processor_has(unit: str) -> None:
    """DYNSPARSE_BF16_UNIT keeps from the matrix units, and from the dot products."""
    env = {**os.environ, "DYNSPARSE_BF16_UNIT": unit}
    done = subprocess.run(
        [sys.executable, "-c", LESSER_UNIT], env=env, capture_output=True, text=True, check=True
    )
    units = ("float32", "AVX-512", "AMX")
    best = native.bfloat16_unit()
    assert done.stdout.strip() == units[min(int(unit), units.index(best))]
