"""Every CPU kernel equals dense float64, on every instruction set of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_of import ISAS, needs_kernels, with_library
from product_checks import LAYOUTS, LOW, activations, check, dense_weight, shuffle_slots
from torch import Tensor

from dynsparse._core import native
from dynsparse.ops.linear import LayerIndex, cost_table, cpu_dense, grad_input, grad_weight, linear
from dynsparse.ops.linear.cpu import KERNELS
from dynsparse.pattern import SparsePattern

sparse, bfloat16 = KERNELS["sparse"], KERNELS["bfloat16"]

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="the compiled kernels are not built"),
    pytest.mark.usefixtures("poisoned"),
]

BLOCK_SIZES = [1, 2, 3, 4, 5, 8, 16, 32, 48, 64, 128]
KINDS = ["sparse", "small", "dense", "bfloat16"]
BLOCKS_OF = {
    "sparse": BLOCK_SIZES,
    "small": list(cost_table.SMALL_BLOCKS),
    "dense": [1, 2, 3, 4, 8, 16, 64],
    "bfloat16": [1, 3, 4, 8, 16, 32, 48, 64, 128],
}
TYPES = {kind: [torch.float32, LOW] if kind == "bfloat16" else [torch.float32] for kind in KINDS}


@pytest.fixture(params=ISAS or ["none"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with native.use_isa(request.param):
        yield request.param


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_shape_pattern_and_stride(kind: str, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    block = data.draw(st.sampled_from(BLOCKS_OF[kind]))
    # The same number of features for every block size, so that large blocks stay quick.
    shape = [
        max(1, 2 * data.draw(st.integers(1, 40)) // block + data.draw(st.integers(0, 1))) * block
        for _ in range(2)
    ]
    batches = [st.integers(0, 20), st.integers(1, 300)]
    batch = data.draw(batches[0] if kind == "small" else st.one_of(*batches))
    density = data.draw(st.sampled_from([0.0, 0.02, 0.1, 0.3, 0.6, 1.0]))
    pattern = SparsePattern.random(shape, density, block_size=block, generator=generator)
    if data.draw(st.booleans()):
        pattern = shuffle_slots(pattern, generator)
    dtype = LOW if kind == "bfloat16" else torch.float32
    x, dy = (
        activations((batch, size), data.draw(st.sampled_from(LAYOUTS)), generator, dtype)
        for size in reversed(shape)
    )
    values_dtype = data.draw(st.sampled_from(TYPES[kind]))
    with_library(
        data.draw(st.sampled_from(ISAS)),
        lambda: check(kind, pattern, x, dy, generator, values_dtype),
    )


def check_batches(
    kind: str,
    pattern: SparsePattern,
    batches: tuple[int, ...],
    generator: torch.Generator,
    layout: str = "contiguous",
) -> None:
    for dtype in TYPES[kind]:
        for batch in batches:
            low = LOW if kind == "bfloat16" else torch.float32
            x = activations((batch, pattern.shape[1]), layout, generator, low)
            dy = activations((batch, pattern.shape[0]), layout, generator, low)
            check(kind, pattern, x, dy, generator, dtype)


@pytest.mark.parametrize(
    ("kind", "block", "threads"),
    [
        (kind, block, threads)
        for kind in KINDS
        for block in BLOCKS_OF[kind]
        for threads in ([1, 2] if kind == "sparse" else [1])
    ],
)
def test_each_instruction_set(isa: str, kind: str, block: int, threads: int) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(block)
    shape = (77, 131) if block == 1 else (7 * block, 11 * block)
    if block >= 48:
        shape = (3 * block, 4 * block)
    pattern = SparsePattern.random(shape, 0.3, block_size=block, generator=generator)
    if threads == 1:
        pattern = shuffle_slots(pattern, generator)
    batches = {
        "sparse": (0, 1, 7, 33, 64, 103),
        "small": (0, *range(1, 18)) if block == 1 else (0, 1, 3, 8),
        "dense": (0, 1, 8, 33),
        "bfloat16": (0, 1, 31, 64, 103, 290),
    }
    check_batches(kind, pattern, batches[kind], generator)


@pytest.mark.parametrize("kind", ["sparse", "bfloat16"])
@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_on_each_instruction_set(isa: str, block: int, layout: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    pattern = SparsePattern.random((48, 80), 0.4, block_size=block, generator=generator)
    check_batches(kind, pattern, (70,), generator, layout)


SHAPES = {
    "more tiles than are packed at once": ((4, 5), 0.5, 16 * 64 + 71, (1, 3, 8, 16)),
    "too wide for full tiles": ((12, 3_000), 0.01, 75, (1,)),
    "far too wide for full tiles": ((12, 20_000), 0.01, 75, (1,)),
    "too high for full tiles": ((20_000, 12), 0.01, 75, (1,)),
    "two strips": ((256, 257), 0.02, 75, (1,)),
    "strips of another size": ((257, 512), 0.02, 75, (1,)),
    "several strips": ((800, 255), 0.02, 75, (1,)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("shape", "density", "batch", "block"),
    [
        pytest.param(*sizes, block, id=f"{name}, {block}")
        for name, (*sizes, blocks) in SHAPES.items()
        for block in blocks
    ],
)
def test_layers_split_over_threads(
    isa: str, threads: int, shape: tuple[int, int], density: float, batch: int, block: int
) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(2)
    size = (shape[0] * block, shape[1] * block)
    pattern = SparsePattern.random(size, density, block_size=block, generator=generator)
    check_batches("sparse", pattern, (batch,), generator)


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("rows", [[1, 1, 5], [2] * 50])
def test_empty_rows_and_columns(isa: str, block: int, rows: list[int]) -> None:
    cols = [0, 4, 4] if len(rows) == 3 else range(50)
    shape = (8 * block, 50 * block)
    pattern = SparsePattern(rows, cols, shape=shape, block_size=block)
    check_batches("sparse", pattern, (9, 70), torch.Generator().manual_seed(3))


@needs_kernels
@pytest.mark.parametrize("density", [0.3, 1.0])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("rows_at_once", [12, 0])  # a block row at least
def test_dense_products_in_chunks(monkeypatch, block, density, rows_at_once) -> None:
    monkeypatch.setattr(cpu_dense, "CHUNK_BYTES", max(1, rows_at_once * 4 * 9 * block))
    generator = torch.Generator().manual_seed(3)
    pattern = SparsePattern.random((11 * block, 9 * block), density, block_size=block)
    check_batches("dense", pattern, (5,), generator)


@pytest.mark.parametrize("block", [1, 4, 16])
def test_scratch_memory_of_earlier_calls_has_no_effect(isa: str, block: int) -> None:
    generator = torch.Generator().manual_seed(5)
    pattern = SparsePattern.random((48, 64), 0.5, block_size=block, generator=generator)
    values = torch.randn(pattern.values_shape)
    p, nan = LayerIndex(pattern.index, values), torch.full((200, 64), torch.nan)
    sparse.forward(nan, values, p, None)
    sparse.backward(torch.full((200, 48), torch.nan), nan, values, p, True, True)
    check_batches("sparse", pattern, (37,), generator)


@pytest.mark.parametrize("block", [1, 4, 16])
def test_infinity_stays_in_its_sample_and_feature(isa: str, block: int) -> None:
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


def passes(kind: str, pattern: SparsePattern, values, x, dy) -> list[Tensor]:
    """Compute all passes of a kernel."""
    p, dbias = LayerIndex(pattern.index, values), torch.empty(pattern.shape[0])
    y = KERNELS[kind].forward(x, values, p, None)
    gradients = KERNELS[kind].backward(dy, x, values, p, True, True, dbias)
    return [y, dbias, *(gradient for gradient in gradients if gradient is not None)]


def operands(shape, block, batch, density=0.3, seed=8):
    generator = torch.Generator().manual_seed(seed)
    pattern = SparsePattern.random(shape, density, block_size=block, generator=generator)
    values = torch.randn(pattern.values_shape, generator=generator)
    x, dy = (torch.randn(batch, size, generator=generator) for size in reversed(shape))
    return pattern, values, x, dy


@pytest.mark.parametrize(
    ("kind", "block", "batch", "shape"),
    [
        *(("sparse", block, 150, (256, 192)) for block in (1, 4, 16)),
        ("sparse", 1, 400, (333, 257)),  # in panels
        *(("small", b, 5, (300 // b * b, 700 // b * b)) for b in cost_table.SMALL_BLOCKS),
        *(("bfloat16", block, 48, (192, 160)) for block in (1, 8, 16)),
        *(("torch", block, 48, (192, 160)) for block in (1, 8, 16)),
    ],
)
def test_results_are_equal_for_any_number_of_threads(isa, kind, block, batch, shape) -> None:
    case = operands(shape, block, batch, density=0.4)
    if kind == "bfloat16":
        case = (case[0], *(tensor.to(LOW) for tensor in case[1:]))
    torch.set_num_threads(1)
    first = passes(kind, *case)
    assert len(first) == 4
    for threads in (2, 2, 3, 5):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, passes(kind, *case), first))


@pytest.mark.parametrize(
    ("kind", "block"), [("sparse", 1), ("sparse", 4), ("sparse", 16), ("dense", 1)]
)
def test_calls_from_several_python_threads(isa: str, kind: str, block: int) -> None:
    cases = [operands((96, size), block, 300, 0.5) for size in (64, 160, 96)]
    alone = [passes(kind, *case) for case in cases]
    wrong: list[int] = []

    def work(which: int) -> None:
        for _ in range(20):
            if not all(map(torch.equal, passes(kind, *cases[which]), alone[which])):
                wrong.append(which)

    workers = [threading.Thread(target=work, args=(which,)) for which in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    cpu_dense.release_memory()
    assert not cpu_dense._pool
    assert torch.equal(passes(kind, *cases[0])[0], alone[0][0])


@pytest.mark.parametrize(("out", "features"), [(2000, 8), (8, 2000)])
def test_bias_gradient_with_idle_threads(isa: str, out: int, features: int) -> None:
    generator = torch.Generator().manual_seed(10)
    pattern = SparsePattern.random((out, features), 0.3, generator=generator)
    for threads in (5, 1):
        torch.set_num_threads(threads)
        check_batches("sparse", pattern, (100,), generator)


def test_offsets_past_two_to_the_31(isa: str, tmp_path: Path) -> None:
    # Three samples 2^30 floats apart, in a file of zeros that takes no space.
    stride = 2**30
    path = tmp_path / "zeros"
    with path.open("wb") as file:
        file.truncate(4 * (2 * stride + 16))
    storage = torch.from_file(str(path), shared=True, size=2 * stride + 16, dtype=torch.float32)
    x = storage.as_strided((3, 8), (stride, 1))
    x.copy_(torch.arange(24.0).view(3, 8))
    generator = torch.Generator().manual_seed(10)
    pattern = SparsePattern.random((4, 8), 0.5, generator=generator)
    check("sparse", pattern, x, torch.randn(3, 4, generator=generator), generator)


# bfloat16 alone.


def test_rounding_of_special_values(isa: str) -> None:
    """As torch: NaN and infinities are kept, and ties round to even."""
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
    y = bfloat16.forward(torch.zeros(3, 1, dtype=LOW), values, p, odd)
    expected = odd.to(LOW).expand(3, -1)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("block", [1, 4, 16, 32, 64])
def test_operator_and_autocast_use_these_kernels(block: int, monkeypatch) -> None:
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
import sys
import pytest
from dynsparse._core import native

tests = "test_each_instruction_set and bfloat16 or test_bfloat16_of_wide_layers"
status = pytest.main([sys.argv[1], "-q", "-k", tests, "-p", "no:cacheprovider", "-m", ""])
print(native.bfloat16_unit())
sys.exit(status)
"""


@needs_kernels
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_bfloat16_of_wide_layers(block: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (max(160 // block, 2) * block, 1024)
    pattern = SparsePattern.random(shape, 0.3, block_size=block, generator=generator)
    check_batches("bfloat16", pattern, (1, 50, 131), generator)


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["0", "1"])
def test_restricted_bfloat16_unit(unit: str) -> None:
    """DYNSPARSE_BF16_UNIT disables the matrix units, and the dot products too."""
    done = subprocess.run(
        [sys.executable, "-c", LESSER_UNIT, __file__],
        env={**os.environ, "DYNSPARSE_BF16_UNIT": unit},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    units = ("float32", "AVX-512", "AMX")
    best = native.bfloat16_unit()
    assert done.stdout.split()[-1] == units[min(int(unit), units.index(best))]
