"""Every configuration computes the same; which one is taken."""

import itertools

import pytest
import torch
from cases import DTYPES, Case, error

pytest.importorskip("triton", reason="needs Triton (x86-64 Linux): make test-gpu-kernels")

from dynsparse.ops.linear.cuda import launch
from dynsparse.ops.linear.cuda.candidates import GRADIENT_CANDIDATES, ROWS_CANDIDATES
from dynsparse.ops.linear.cuda.chip import INTERPRETED, Chip
from dynsparse.ops.linear.cuda.configurations import (
    BLOCKS,
    GRADIENT,
    ROWS,
    Gradient,
    Rows,
    family_of,
    gradient_for,
    group_of,
    numbers_of,
    rows_for,
    split_of,
)


def tiles(b):
    """Of the tables and candidates, what the interpreter can tell apart."""
    tables = [c for by_numbers in ROWS.values() for table in by_numbers.values() for c in table[b]]
    known = {(c.samples, c.inputs, c.way) for c in [*tables, *ROWS_CANDIDATES[b]]}
    return [(b, *tile) for tile in sorted(known)]


def shares(b):
    tables = [table[b] for by_numbers in GRADIENT.values() for table in by_numbers.values()]
    known = {(c.blocks, c.samples) for c in [*tables, *(c for c, _ in GRADIENT_CANDIDATES[b])]}
    return [(b, *share) for share in sorted(known)]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("b", "samples", "inputs", "way"), list(itertools.chain(*map(tiles, BLOCKS)))
)
def test_every_tile(b, samples, inputs, way):
    case = Case(b, (2, 5), samples + 5, torch.bfloat16, without=1)
    config = Rows(samples, inputs, 4, 3, way)
    values = case.values.bfloat16()
    y = launch.forward(case.x, values, case.p, case.bias, config)
    dx = launch.grad_input(case.dy, values, case.p, config)
    assert error(y, case.y) < case.limit
    assert error(dx, case.dx) < case.limit


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("way", ["tma", "swapped"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 64, 150])
def test_the_copy_engine_for_every_dtype_and_ragged_batches(batch, dtype, way):
    case = Case(64, (3, 4), batch, dtype, without=2)
    config = Rows(64, 32, 4, 3, way)
    values = case.values.to(dtype)
    y = launch.forward(case.x, values, case.p, case.bias, config)
    dx = launch.grad_input(case.dy, values, case.p, config)
    assert error(y, case.y) < case.limit
    assert error(dx, case.dx) < case.limit


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
@pytest.mark.parametrize("density", [0.4, 0.0])
def test_what_the_copy_engine_does_not_take_goes_by_pointers(layout, density):
    case = Case(64, (2, 3), 21, torch.float32, density, layout)
    config = Rows(64, 32, 4, 3, "tma")
    y = launch.forward(case.x, case.values, case.p, case.bias, config)
    dx = launch.grad_input(case.dy, case.values, case.p, config)
    torch.testing.assert_close(y, case.y.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dx, case.dx.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("way", ["tma", "swapped"])
def test_a_tile_of_several_blocks_goes_by_pointers(way):
    case = Case(16, (4, 6), 70, torch.float32)
    config = Rows(64, 64, 4, 3, way)
    y = launch.forward(case.x, case.values, case.p, case.bias, config)
    dx = launch.grad_input(case.dy, case.values, case.p, config)
    assert error(y, case.y) < case.limit
    assert error(dx, case.dx) < case.limit


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize(("b", "number", "samples"), list(itertools.chain(*map(shares, BLOCKS))))
def test_every_share_of_the_gradient(b, number, samples, split):
    case = Case(b, (3, 4), 2 * samples + 9, torch.bfloat16, without=2)
    config = Gradient(number, samples, 4, 3)
    dw = launch.grad_weight(case.dy, case.x, case.p, torch.float32, config, split)
    assert error(dw, case.dw) < 1e-6


@pytest.mark.parametrize(
    ("capability", "family"),
    [
        ((8, 0), "80"),
        ((8, 6), "86"),
        ((8, 7), "80"),
        ((8, 9), "86"),
        ((9, 0), "90"),
        ((10, 0), "100"),
        ((10, 3), "100"),
        ((11, 0), "100"),
        ((12, 0), "86"),
        ((12, 1), "86"),
        ((13, 0), "86"),
    ],
)
def test_every_capability_has_configurations(capability, family):
    assert family_of(capability) == family
    chip = Chip(capability, 100, 40 << 20)
    for b, dtype in itertools.product(BLOCKS, DTYPES):
        assert rows_for(b, dtype, 8192, 64, chip) == ROWS[family][numbers_of(dtype)][b][0]
        assert gradient_for(b, dtype, chip) == GRADIENT[family][numbers_of(dtype)][b]


def test_small_layers_and_batches_take_small_tiles():
    wide, narrow = ROWS["90"]["16-bit"][64]
    assert rows_for(64, torch.bfloat16, 8192, 64, INTERPRETED) == wide
    assert rows_for(64, torch.bfloat16, 512, 16, INTERPRETED) == narrow
    assert rows_for(64, torch.bfloat16, 132 * 128, 1, INTERPRETED) == wide
    assert rows_for(64, torch.bfloat16, 131 * 128, 1, INTERPRETED) == narrow


def test_tiles_of_x_fit_into_a_third_of_the_cache():
    assert group_of(128, 4096, torch.bfloat16, INTERPRETED) == 8
    assert group_of(128, 16384, torch.bfloat16, INTERPRETED) == 5
    assert group_of(128, 1 << 20, torch.float32, INTERPRETED) == 1


@pytest.mark.parametrize(
    ("b", "density", "split"),
    [(128, 0.1, 2), (64, 0.1, 1), (32, 0.1, 1), (16, 0.1, 1), (128, 0.02, 4)],
)
def test_few_programs_share_the_samples(b, density, split):
    # 4096 features: 102 blocks of 128 would leave multiprocessors idle.
    rows = 4096 // b
    c = gradient_for(b, torch.bfloat16, INTERPRETED)
    found = split_of(c, b, round(rows * rows * density), rows, 8192, 2, INTERPRETED)
    assert found == split


@pytest.mark.parametrize("batch", [1, 64, 500, 1023])
def test_few_samples_are_not_shared_by_many(batch):
    c = gradient_for(128, torch.bfloat16, INTERPRETED)
    assert split_of(c, 128, 4, 32, batch, 2, INTERPRETED) <= max(1, batch // (4 * c.samples))
