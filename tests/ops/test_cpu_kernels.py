"""The compiled products against dense float64, on every instruction set this machine runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_of import needs_kernels
from torch import Tensor

from dynsparse._core import native
from dynsparse.ops.linear import LayerIndex
from dynsparse.ops.linear.cpu import KERNELS
from dynsparse.pattern import SparsePattern

sparse = KERNELS["sparse"]

ISAS = [isa for isa in native.supported_isas() if isa in native.describe()["available"]]
pytestmark = pytest.mark.skipif(not ISAS, reason="the compiled kernels are not built")

BLOCK_SIZES = [1, 2, 3, 4, 5, 8, 16, 32, 48, 64, 128]


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


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def strided(shape: tuple[int, int], layout: str, generator: torch.Generator) -> Tensor:
    """Random activations [batch, features] in memory of the given layout."""
    batch, features = shape
    if layout == "transposed":
        return torch.randn(features, batch, generator=generator).t()
    if layout == "sliced rows":
        return torch.randn(batch, features + 5, generator=generator)[:, 3 : features + 3]
    if layout == "sliced both":
        return torch.randn(2 * batch, 3 * features, generator=generator)[::2, ::3]
    if layout == "expanded batch":
        return torch.randn(1, features, generator=generator).expand(batch, features)
    if layout == "expanded features":
        return torch.randn(batch, 1, generator=generator).expand(batch, features)
    return torch.randn(batch, features, generator=generator)


LAYOUTS = [
    "contiguous",
    "transposed",
    "sliced rows",
    "sliced both",
    "expanded batch",
    "expanded features",
]


def dense_weight(pattern: SparsePattern, values: Tensor) -> Tensor:
    b = pattern.block_size
    height, width = pattern.grid
    weight = torch.zeros(height, b, width, b, dtype=torch.float64)
    weight[pattern.rows.long(), :, pattern.cols.long()] = values.double().view(-1, b, b)
    return weight.view(pattern.shape)


def check(pattern: SparsePattern, x: Tensor, dy: Tensor, generator: torch.Generator) -> None:
    """Forward and backward, all combinations of what is needed, against dense float64."""
    values = torch.randn(pattern.values_shape, generator=generator)
    bias = torch.randn(pattern.shape[0], generator=generator)
    weight = dense_weight(pattern, values)
    b = pattern.block_size
    height, width = pattern.grid
    gradient = (dy.double().t() @ x.double()).view(height, b, width, b)
    expected_dvalues = gradient[pattern.rows.long(), :, pattern.cols.long()].view(values.shape)
    expected_y = x.double() @ weight.t()
    expected_dx = dy.double() @ weight

    def close(got: Tensor, expected: Tensor, terms: int) -> None:
        assert got.dtype is torch.float32
        assert got.shape == expected.shape
        assert got.is_contiguous()
        # Rounding errors of a sum of normal products grow with the square root of its length.
        tolerance = 2e-6 * (terms + 4) ** 0.5
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=tolerance)

    close(
        sparse.forward(x, values, LayerIndex(pattern.index, values), None),
        expected_y,
        pattern.shape[1],
    )
    close(
        sparse.forward(x, values, LayerIndex(pattern.index, values), bias),
        expected_y + bias,
        pattern.shape[1],
    )
    for need_input in (True, False):
        for need_values in (True, False):
            dbias = torch.empty(pattern.shape[0])
            dx, dvalues = sparse.backward(
                dy, x, values, LayerIndex(pattern.index, values), need_input, need_values, dbias
            )
            close(dbias, dy.double().sum(0), len(x))
            assert (dx is not None) == need_input
            assert (dvalues is not None) == need_values
            if dx is not None:
                close(dx, expected_dx, pattern.shape[0])
            if dvalues is not None:
                close(dvalues, expected_dvalues, len(x))


@needs_kernels
@given(
    block=st.sampled_from(BLOCK_SIZES),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    batch=st.one_of(st.integers(1, 20), st.integers(1, 200)),
    density=st.sampled_from([0.0, 0.02, 0.1, 0.3, 1.0]),
    x_layout=st.sampled_from(LAYOUTS),
    dy_layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=60)
def test_any_shape_pattern_and_stride(
    block: int,
    height: int,
    width: int,
    batch: int,
    density: float,
    x_layout: str,
    dy_layout: str,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # The same number of features for every block size, so that large blocks stay quick.
    shape = (max(1, 2 * height // block) * block, max(1, 2 * width // block) * block)
    pattern = SparsePattern.random(shape, density, block_size=block, generator=generator)
    x = strided((batch, shape[1]), x_layout, generator)
    dy = strided((batch, shape[0]), dy_layout, generator)
    check(pattern, x, dy, generator)


@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_each_instruction_set(isa: str, threads: int, block: int) -> None:
    generator = torch.Generator().manual_seed(block)
    shape = (77, 131) if block == 1 else (7 * block, 11 * block)
    if block > 48:
        shape = (3 * block, 4 * block)
    pattern = SparsePattern.random(shape, 0.3, block_size=block, generator=generator)
    for batch in (1, 7, 33, 64, 103):
        x = strided((batch, shape[1]), "contiguous", generator)
        dy = strided((batch, shape[0]), "contiguous", generator)
        check(pattern, x, dy, generator)


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_on_each_instruction_set(isa: str, block: int, layout: str) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (48, 80)
    pattern = SparsePattern.random(shape, 0.4, block_size=block, generator=generator)
    x = strided((70, 80), layout, generator)
    dy = strided((70, 48), layout, generator)
    check(pattern, x, dy, generator)


@pytest.mark.parametrize("block", [1, 3, 8, 16])
def test_more_tiles_than_are_packed_at_once(isa: str, threads: int, block: int) -> None:
    generator = torch.Generator().manual_seed(2)
    shape = (4 * block, 5 * block)
    pattern = SparsePattern.random(shape, 0.5, block_size=block, generator=generator)
    batch = 16 * 64 + 71
    check(
        pattern,
        torch.randn(batch, shape[1], generator=generator),
        torch.randn(batch, shape[0], generator=generator),
        generator,
    )


@pytest.mark.parametrize("shape", [(12, 3_000), (12, 20_000), (20_000, 12)])
def test_layers_too_wide_for_full_tiles(isa: str, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    pattern = SparsePattern.random(shape, 0.01, generator=generator)
    x = torch.randn(75, shape[1], generator=generator)
    dy = torch.randn(75, shape[0], generator=generator)
    check(pattern, x, dy, generator)


@pytest.mark.parametrize("shape", [(256, 257), (257, 512), (800, 255)])
def test_layers_of_several_strips(isa: str, threads: int, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(14)
    pattern = SparsePattern.random(shape, density=0.02, generator=generator)
    x = torch.randn(75, shape[1], generator=generator)
    dy = torch.randn(75, shape[0], generator=generator)
    check(pattern, x, dy, generator)


@pytest.mark.parametrize("block", [1, 4, 16])
def test_empty_rows_and_columns(isa: str, block: int) -> None:
    generator = torch.Generator().manual_seed(3)
    pattern = SparsePattern([1, 1, 5], [0, 4, 4], shape=(8 * block, 7 * block), block_size=block)
    x = torch.randn(9, 7 * block, generator=generator)
    dy = torch.randn(9, 8 * block, generator=generator)
    check(pattern, x, dy, generator)


@pytest.mark.parametrize("block", [1, 4, 16])
def test_one_row_holds_everything(isa: str, block: int) -> None:
    generator = torch.Generator().manual_seed(4)
    pattern = SparsePattern([2] * 50, range(50), shape=(4 * block, 50 * block), block_size=block)
    x = torch.randn(70, 50 * block, generator=generator)
    dy = torch.randn(70, 4 * block, generator=generator)
    check(pattern, x, dy, generator)


@pytest.mark.parametrize("block", [1, 4, 16])
def test_empty_batch(isa: str, block: int) -> None:
    pattern = SparsePattern.random((16, 32), 0.5, block_size=block)
    values = torch.randn(pattern.values_shape)
    y = sparse.forward(
        torch.empty(0, 32), values, LayerIndex(pattern.index, values), torch.zeros(16)
    )
    assert y.shape == (0, 16)
    dx, dvalues = sparse.backward(
        torch.empty(0, 16),
        torch.empty(0, 32),
        values,
        LayerIndex(pattern.index, values),
        True,
        True,
    )
    assert dx is not None
    assert dvalues is not None
    assert dx.shape == (0, 32)
    assert bool((dvalues == 0).all())


@pytest.mark.parametrize("block", [1, 4, 16])
def test_what_earlier_calls_left_in_scratch_memory_does_not_show(isa: str, block: int) -> None:
    generator = torch.Generator().manual_seed(5)
    pattern = SparsePattern.random((48, 64), 0.5, block_size=block, generator=generator)
    values = torch.randn(pattern.values_shape)
    nan = torch.full((200, 64), torch.nan)
    sparse.forward(nan, values, LayerIndex(pattern.index, values), None)
    sparse.backward(
        torch.full((200, 48), torch.nan), nan, values, LayerIndex(pattern.index, values), True, True
    )
    check(pattern, torch.randn(37, 64), torch.randn(37, 48), generator)


@pytest.mark.parametrize("block", [1, 4, 16])
def test_infinities_stay_in_their_sample_and_feature(isa: str, block: int) -> None:
    generator = torch.Generator().manual_seed(6)
    pattern = SparsePattern.random((48, 64), 0.3, block_size=block, generator=generator)
    values = torch.randn(pattern.values_shape, generator=generator)
    x = torch.randn(37, 64, generator=generator)
    dy = torch.randn(37, 48, generator=generator)
    x[5], dy[7] = torch.inf, torch.inf
    y = sparse.forward(x, values, LayerIndex(pattern.index, values), None)
    dx, _ = sparse.backward(dy, x, values, LayerIndex(pattern.index, values), True, True)
    assert dx is not None
    others = torch.arange(37)
    assert bool(torch.isfinite(y[others != 5]).all())
    assert bool(torch.isfinite(dx[others != 7]).all())


@pytest.mark.parametrize("block", [1, 4, 16])
def test_values_and_bias_of_any_alignment(isa: str, block: int) -> None:
    generator = torch.Generator().manual_seed(7)
    pattern = SparsePattern.random((48, 64), 0.3, block_size=block, generator=generator)
    count = pattern.nnz * block * block
    values = torch.randn(count + 1, generator=generator)[1:].view(pattern.values_shape)
    bias = torch.randn(49, generator=generator)[1:]
    x = torch.randn(21 * 64 + 1, generator=generator)[1:].view(21, 64)
    y = sparse.forward(x, values, LayerIndex(pattern.index, values), bias)
    expected = x.double() @ dense_weight(pattern, values).t() + bias
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("block", [1, 4, 16])
def test_repeated_calls_agree_bit_for_bit(isa: str, block: int) -> None:
    generator = torch.Generator().manual_seed(8)
    pattern = SparsePattern.random((256, 192), 0.3, block_size=block, generator=generator)
    values = torch.randn(pattern.values_shape, generator=generator)
    x = torch.randn(150, 192, generator=generator)
    dy = torch.randn(150, 256, generator=generator)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 2, 2):
        torch.set_num_threads(threads)
        p, dbias = LayerIndex(pattern.index, values), torch.empty(256)
        y = sparse.forward(x, values, p, None)
        results.append((y, dbias, *sparse.backward(dy, x, values, p, True, True, dbias)))
    torch.set_num_threads(before)
    for result in results[1:]:
        for got, first in zip(result, results[0], strict=True):
            assert got is not None
            assert first is not None
            assert torch.equal(got, first)


@pytest.mark.parametrize(("out", "features"), [(2000, 8), (8, 2000)])
def test_a_bias_gets_its_gradient_from_threads_without_other_work(
    isa: str, out: int, features: int
) -> None:
    generator = torch.Generator().manual_seed(10)
    pattern = SparsePattern.random((out, features), 0.3, generator=generator)
    values = torch.randn(pattern.values_shape, generator=generator)
    x, dy = torch.randn(100, features), torch.randn(100, out, generator=generator)
    before = torch.get_num_threads()
    try:
        for threads in (5, 1):
            torch.set_num_threads(threads)
            for needs in ((True, True), (True, False), (False, True), (False, False)):
                dbias = torch.empty(out)
                sparse.backward(dy, x, values, LayerIndex(pattern.index, values), *needs, dbias)
                torch.testing.assert_close(dbias, dy.double().sum(0).float(), rtol=0, atol=2e-5)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("block", [1, 4, 16])
def test_calls_from_two_python_threads(isa: str, block: int) -> None:
    generator = torch.Generator().manual_seed(9)
    cases = []
    for features in (64, 160):
        pattern = SparsePattern.random((96, features), 0.3, block_size=block, generator=generator)
        values = torch.randn(pattern.values_shape, generator=generator)
        x = torch.randn(100, features, generator=generator)
        dy = torch.randn(100, 96, generator=generator)
        alone = (
            sparse.forward(x, values, LayerIndex(pattern.index, values), None),
            *sparse.backward(dy, x, values, LayerIndex(pattern.index, values), True, True),
        )
        cases.append((pattern, values, x, dy, alone))
    wrong: list[int] = []

    def work(which: int) -> None:
        pattern, values, x, dy, alone = cases[which]
        for _ in range(20):
            got = (
                sparse.forward(x, values, LayerIndex(pattern.index, values), None),
                *sparse.backward(dy, x, values, LayerIndex(pattern.index, values), True, True),
            )
            if not all(torch.equal(a, b) for a, b in zip(got, alone, strict=True)):
                wrong.append(which)

    workers = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_offsets_past_two_to_the_31(isa: str, tmp_path: Path) -> None:
    # Three samples 2^30 floats apart, in a file of zeros that takes no room.
    stride = 2**30
    path = tmp_path / "zeros"
    with path.open("wb") as file:
        file.truncate(4 * (2 * stride + 16))
    storage = torch.from_file(str(path), shared=True, size=2 * stride + 16, dtype=torch.float32)
    x = storage.as_strided((3, 8), (stride, 1))
    x.copy_(torch.arange(24.0).view(3, 8))
    generator = torch.Generator().manual_seed(10)
    pattern = SparsePattern.random((4, 8), 0.5, generator=generator)
    check(pattern, x, torch.randn(3, 4, generator=generator), generator)
