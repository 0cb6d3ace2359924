"""Products in panels: with many samples, the kernels process the entries panel by panel.

The kernels choose the threshold; the sizes here are above it (csrc/linear/element/panels.cpp).
"""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from product_checks import activations, check, shuffle_slots
from torch import Tensor

from dynsparse._core import native
from dynsparse.ops.linear import LayerIndex, panels
from dynsparse.ops.linear.cpu import KERNELS
from dynsparse.pattern import PatternIndex, SparsePattern

sparse = KERNELS["sparse"]

pytestmark = [
    pytest.mark.skipif(native.load() is None, reason="the compiled kernels are not built"),
    pytest.mark.usefixtures("poisoned"),
]


@given(
    out=st.integers(1, 300),
    features=st.integers(1, 500),
    density=st.sampled_from([0.25, 0.5, 0.9, 1.0]),
    more=st.integers(0, 140),
    transposed=st.booleans(),
    thread_count=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=40)
def test_any_shape(
    out: int,
    features: int,
    density: float,
    more: int,
    transposed: bool,
    thread_count: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    torch.set_num_threads(thread_count)
    pattern = SparsePattern.random((out, features), density, generator=generator)
    batch = 256 + more
    layout = "transposed" if transposed else "contiguous"
    x, dy = (activations((batch, size), layout, generator) for size in (features, out))
    check("sparse", pattern, x, dy, generator)


def test_many_rows_with_few_features() -> None:
    generator = torch.Generator().manual_seed(1)
    pattern = SparsePattern.random((4500, 70), 0.3, generator=generator)
    x, dy = torch.randn(300, 70, generator=generator), torch.randn(300, 4500, generator=generator)
    for thread_count in (1, 2):
        torch.set_num_threads(thread_count)
        check("sparse", pattern, x, dy, generator)


@pytest.mark.parametrize("shape", [(1500, 1700), (2600, 90), (90, 2600)])
@pytest.mark.parametrize("batch", [17, 70, 256, 333])
def test_several_panels(shape: tuple[int, int], batch: int) -> None:
    generator = torch.Generator().manual_seed(5)
    pattern = SparsePattern.random(shape, 0.2, generator=generator)
    if batch > 256:
        pattern = shuffle_slots(pattern, generator)
    x = torch.randn(batch, shape[1], generator=generator)
    dy = torch.randn(batch, shape[0], generator=generator)
    for thread_count in (1, 3):
        torch.set_num_threads(thread_count)
        check("sparse", pattern, x, dy, generator)


@pytest.mark.parametrize("size", [16, 48, 256, 1024, 2**16])
def test_panels_of_any_size(size: int) -> None:
    generator = torch.Generator().manual_seed(7)
    pattern = SparsePattern.random((500, 700), 0.1, generator=generator)
    values = torch.randn(pattern.nnz, generator=generator)
    x, dy = torch.randn(200, 700, generator=generator), torch.randn(200, 500, generator=generator)
    p = LayerIndex(pattern.index, values)
    rows, perm = p.column_order()
    p.panels = [
        (0, panels.make_panels(False, 500, 700, p.cols, p.row_ptr, p.slots, size=size)),
        (0, panels.make_panels(True, 700, 500, rows, p.col_ptr, perm, size=size)),
    ]
    for thread_count in (1, 3):
        torch.set_num_threads(thread_count)
        check("sparse", pattern, x, dy, generator, p=p)


@pytest.mark.parametrize("kib", [16, 32, 48, 64, 128])
def test_panel_size_follows_the_l1_cache(kib: int) -> None:
    library = native.load()
    assert library is not None
    feature = 64 * {"v4": 4, "v3": 2}.get(str(native.describe()["isa"]), 1)  # bytes in a tile
    for by_columns in (False, True):
        size = library.dynsparse_panels_size(4096, 4096, 4096 * 2048, by_columns, kib << 10)
        assert size % 16 == 0
        assert kib << 10 <= size * feature <= 2 * (kib << 10)


def test_few_entries_use_larger_panels() -> None:
    library = native.load()
    assert library is not None
    sizes = [library.dynsparse_panels_size(4096, 4096, 4096 * 40, c, 1 << 15) for c in (0, 1)]
    assert sizes == [1024, 2048]


def test_rows_and_tiles_without_entries() -> None:
    # Full rows beside empty ones, and a stretch of columns that nothing points to.
    generator = torch.Generator().manual_seed(2)
    mask = torch.zeros(40, 400, dtype=torch.bool)
    mask[::3, :150] = True
    mask[1, 290:] = True
    pattern = SparsePattern.from_mask(mask)
    x, dy = torch.randn(700, 400, generator=generator), torch.randn(700, 40, generator=generator)
    y = check("sparse", pattern, x, dy, generator)
    assert y[:, 2].unique().numel() == 1  # the bias alone


def shuffled_inside(ptr: Tensor, generator: torch.Generator) -> Tensor:
    """Return a permutation of the entries that keeps each in its row (or column)."""
    return torch.cat(
        [
            start + torch.randperm(int(end - start), generator=generator)
            for start, end in itertools.pairwise(ptr.long())
        ]
    )


def test_index_in_any_order() -> None:
    generator = torch.Generator().manual_seed(4)
    pattern = SparsePattern.random((300, 400), 0.5, generator=generator)
    values = torch.randn(pattern.nnz, generator=generator)
    x, dy = torch.randn(300, 400, generator=generator), torch.randn(300, 300, generator=generator)
    index = pattern.index
    rows = shuffled_inside(index.row_ptr, generator)
    columns = shuffled_inside(index.col_ptr, generator)
    place = torch.empty_like(rows)
    place[rows] = torch.arange(len(rows))  # of an entry among the shuffled ones
    by_rows = PatternIndex(
        index.row_ptr,
        index.cols[rows],
        index.col_ptr,
        index.csc_rows,
        place[index.csc_perm.long()].int(),
        index.slots,
    )
    by_columns = PatternIndex(
        index.row_ptr,
        index.cols,
        index.col_ptr,
        index.csc_rows[columns],
        index.csc_perm[columns],
        index.slots,
    )
    y = sparse.forward(x, values, LayerIndex(index, values), None)
    dx, dw = sparse.backward(dy, x, values, LayerIndex(index, values), True, True)
    assert dx is not None
    assert dw is not None
    for other, order in ((by_rows, rows), (by_columns, torch.arange(len(rows)))):
        got = sparse.forward(x, values[order], LayerIndex(other, values[order]), None)
        torch.testing.assert_close(got, y, rtol=1e-4, atol=1e-4)
        for need_input in (True, False):
            got_dx, got_dw = sparse.backward(
                dy, x, values[order], LayerIndex(other, values[order]), need_input, True
            )
            assert got_dw is not None
            torch.testing.assert_close(got_dw, dw[order], rtol=1e-4, atol=1e-4)
            if got_dx is not None:
                torch.testing.assert_close(got_dx, dx, rtol=1e-4, atol=1e-4)


def prepared(density: float = 0.3, block_size: int = 1) -> tuple[SparsePattern, LayerIndex]:
    generator = torch.Generator().manual_seed(6)
    pattern = SparsePattern.random((320, 480), density, block_size=block_size, generator=generator)
    return pattern, LayerIndex(pattern.index, torch.zeros(pattern.values_shape))


def by_columns(p: LayerIndex, batch: int) -> torch.Tensor | None:
    return panels.column_panels(p, batch, p.column_order())


@pytest.mark.skipif(native.describe()["isa"] != "v4", reason="narrow vectors need larger layers")
def test_inference_index_stores_no_panels() -> None:
    pattern, fat = prepared()
    nothing = fat.cols.new_empty(0)
    p = LayerIndex(
        pattern.index._replace(csc_rows=nothing, csc_perm=nothing),
        torch.zeros(pattern.nnz),
        keep=False,
    )
    for of in (panels.row_panels, by_columns):
        made = of(p, 1000)
        assert made is not None
        assert torch.equal(made, of(fat, 1000))
        assert of(p, 1) is None
        assert of(p, 1000) is not made
    assert [kept for _, kept in p.panels] == [None, None]


@pytest.mark.skipif(native.describe()["isa"] != "v4", reason="narrow vectors need larger layers")
def test_panels_are_built_once_and_only_if_useful() -> None:
    pattern, p = prepared()
    for of in (panels.row_panels, by_columns):
        assert of(p, 1) is None
        made = of(p, 1000)
        assert made is not None
        assert of(p, 1000) is made
        assert of(p, 1) is None
        # Calls through the dispatcher have the same index tensors and nothing else.
        assert of(LayerIndex(pattern.index, torch.zeros(pattern.nnz)), 1000) is made
    assert panels.row_panels(prepared()[1], 1000) is not panels.row_panels(p, 1000)
    assert by_columns(prepared(block_size=8)[1], 1000) is None
    assert by_columns(prepared(density=0.001)[1], 1000) is None


@pytest.mark.skipif(native.describe()["isa"] != "v4", reason="narrow vectors need larger layers")
def test_panels_are_rebuilt_after_a_change() -> None:
    pattern, p = prepared()
    made = by_columns(p, 1000)
    pattern.index.csc_perm.add_(0)
    again = LayerIndex(pattern.index, torch.zeros(pattern.nnz))
    assert by_columns(again, 1000) is not made
    assert by_columns(again, 1000) is not None


def test_panels_of_deleted_patterns_are_freed() -> None:
    before = len(panels._cache._entries)
    pattern, p = prepared()
    by_columns(p, 1000)
    del pattern, p
    gc.collect()
    assert len(panels._cache._entries) == before
