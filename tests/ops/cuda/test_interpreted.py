"""The patched interpreter is correct, and Triton is restored afterwards."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton (x86-64 Linux): make test-gpu-kernels")

import interpreted
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from dynsparse.ops.linear.cuda import kernels, launch


@triton.jit
def product_kernel(a, b, out, n: tl.constexpr):
    i = tl.arange(0, n)
    at = i[:, None] * n + i[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def cast_kernel(x, out, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, tl.load(x + i).to(tl.bfloat16))


@triton.jit
def loop_kernel(bounds, out):
    for i in range(tl.load(bounds), tl.load(bounds + 1)):
        tl.store(out + i, i)


def run(kernel, *args):
    with interpreted.kernels():
        InterpretedFunction(kernel.fn)[(1,)](*args)


def test_bfloat16_products():
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    out = torch.empty(16, 16)
    run(product_kernel, a, b, out, 16)
    torch.testing.assert_close(out, a.float() @ b.float())


def test_float32_to_bfloat16_rounds_as_torch():
    x = torch.cat(
        [
            torch.randn(500),
            torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.00390625]),
            torch.tensor([1.01171875, 3.4e38, 1e-40, -1.00390626, 65504.0, 1.0]),
        ]
    )
    out = torch.empty(512, dtype=torch.bfloat16)
    run(cast_kernel, x, out, 512)
    assert torch.equal(out.isnan(), x.isnan())
    assert torch.equal(out.nan_to_num(), x.bfloat16().nan_to_num())


def test_loop_bounds_from_memory():
    out = torch.zeros(6, dtype=torch.int32)
    run(loop_kernel, torch.tensor([2, 5], dtype=torch.int32), out)
    assert out.tolist() == [0, 0, 2, 3, 4, 0]


def test_triton_is_restored():
    places = (tl, tl.core, tl.math, tl.tensor, launch, kernels, triton.runtime.interpreter)
    before = [dict(vars(place)) for place in places]
    with interpreted.kernels():
        assert not isinstance(launch.rows_kernel, JITFunction)
        assert not isinstance(tl.cdiv, JITFunction)
    assert isinstance(launch.rows_kernel, JITFunction)
    for place, known in zip(places, before, strict=True):
        assert {
            key: value for key, value in vars(place).items() if key != "interpreter_builder"
        } == {key: value for key, value in known.items() if key != "interpreter_builder"}
