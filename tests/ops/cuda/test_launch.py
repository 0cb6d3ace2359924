"""Launches without Triton's dispatch run the kernel that it would run, with the same arguments."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton (x86-64 Linux): make test-gpu-kernels")

import triton
from compiled import Driver
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from dynsparse import SparsePattern
from dynsparse.ops.linear import LayerIndex
from dynsparse.ops.linear.cuda import blocks, launch
from dynsparse.ops.linear.cuda.configurations import Gradient, Rows


class RecordingDriver(Driver):
    """A mock driver of a Hopper GPU that records what is launched."""

    def __init__(self) -> None:
        super().__init__(90)
        self.launches: list[tuple] = []
        self.utils = mock.Mock(
            load_binary=lambda *args: (None, None, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
        )

    def launcher_cls(self, source, metadata):
        def run(*args):
            grid, arguments = args[:3], args[9:]
            self.launches.append((metadata.hash, grid, [_describe(a) for a in arguments]))

        return run


def _describe(argument: object) -> object:
    if isinstance(argument, TensorDescriptor):
        return [*_describe(argument.base), argument.block_shape, argument.padding]
    if isinstance(argument, Tensor):
        return [argument.dtype, *argument.shape, *argument.stride()]
    return argument


@pytest.fixture(scope="module")
def driver():
    with pytest.MonkeyPatch.context() as patch:
        driver = RecordingDriver()
        patch.setattr(triton.runtime.driver, "_active", driver)
        patch.setattr(launch, "_compiled", {})
        yield driver


def run_all(case, driver: RecordingDriver) -> list[tuple]:
    """Run the passes of a case; return what was launched."""
    driver.launches.clear()
    b, dtype, bias_dtype, batch, layout, tma, ordered, offset = case
    generator = torch.Generator().manual_seed(0)
    pattern = SparsePattern.random((2 * b, 3 * b), 0.5, block_size=b, generator=generator)
    if not ordered:
        pattern = pattern._to_explicit_slots()
    values = torch.zeros(pattern.values_shape, dtype=dtype)
    p = LayerIndex(pattern.index, values)
    x, dy = (_activations(batch, n, dtype, layout) for n in (3 * b, 2 * b))
    bias = None
    if bias_dtype is not None:
        bias = torch.zeros(2 * b + offset, dtype=bias_dtype)[offset:]
    tma = tma and dtype is not torch.float32
    rows, gradient = Rows(64, 16, 4, 2, tma=tma), Gradient(1, 32, 4, 2, tma=tma)
    launch.forward(x, values, p, bias, rows)
    launch.grad_input(dy, values, p, rows)
    launch.grad_weight(dy, x, p, torch.float32, gradient, None if bias is None else [])
    launch.lay_out(values, p, torch.bfloat16)
    return list(driver.launches)


def _activations(batch: int, features: int, dtype: torch.dtype, layout: str) -> Tensor:
    if layout == "transposed":
        return blocks.ensure_aligned(torch.zeros(features, batch, dtype=dtype).t())
    return torch.zeros(batch, features, dtype=dtype)


# The first of each varies no property; the others vary one.
PROPERTIES = (
    (64, 16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16, None),
    (64, 40, 16, 1),
    ("contiguous", "transposed"),
    (True, False),
    (True, False),
    (0, 1),
)


@pytest.mark.parametrize("tma", [False, True])
def test_launches_equal_those_of_triton(driver, tma):
    base = [values[0] for values in PROPERTIES]
    base[5] = tma
    cases = [base]
    for i, values in enumerate(PROPERTIES):
        cases += [[*base[:i], value, *base[i + 1 :]] for value in values[1:]]
    for case in cases:
        run_all(case, driver)
    found = [run_all(case, driver) for case in cases]
    for case, launches in zip(cases, found, strict=True):
        with mock.patch.object(launch, "_compiled", {}):
            assert run_all(case, driver) == launches


def test_only_the_first_launch_goes_through_triton(driver, monkeypatch):
    case = (16, torch.bfloat16, torch.float32, 64, "contiguous", True, True, 0)
    first = run_all(case, driver)
    assert len(first) == 4
    assert all(isinstance(kernel, CompiledKernel) for kernel in launch._compiled.values())
    monkeypatch.setattr(JITFunction, "run", mock.Mock(side_effect=AssertionError))
    assert run_all(case, driver) == first
