"""All configurations compute the same, and the choice between them."""

import itertools

import pytest
import torch
from cases import DTYPES, Case, error

pytest.importorskip("triton", reason="needs Triton (x86-64 Linux): make test-gpu-kernels")

import compiled

from dynsparse.ops.grow import cuda as growth
from dynsparse.ops.linear.cuda import launch
from dynsparse.ops.linear.cuda.chip import INTERPRETED, Chip, numbers_of
from dynsparse.ops.linear.cuda.configurations import (
    BLOCKS,
    HOPPER,
    OTHERS,
    Gradient,
    Rows,
    choose_gradient,
    choose_rows,
)

TABLES = [*HOPPER.values(), *OTHERS.values()]


def tiles(b):
    """Return the tiles of the tables and candidates that differ for the interpreter."""
    known = [c for table in TABLES for c in table.rows[b]]
    known += [c for candidates in compiled.ROWS.values() for c in candidates[b]]
    return [(b, *tile) for tile in sorted({(c.samples, c.inputs, c.tma) for c in known})]


def shares(b):
    known = [table.gradient[b] for table in TABLES]
    known += [c for candidates in compiled.GRADIENT.values() for c in candidates[b]]
    return [(b, *share) for share in sorted({(c.blocks, c.samples, c.tma) for c in known})]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("b", "samples", "inputs", "tma"), list(itertools.chain(*map(tiles, BLOCKS)))
)
def test_every_tile(b, samples, inputs, tma):
    case = Case(b, (2, 5), samples + 5, torch.bfloat16, without=1)
    config = Rows(samples, inputs, 4, 3, tma=tma)
    values = case.values.bfloat16()
    y = launch.forward(case.x, values, case.p, case.bias, config)
    dx = launch.grad_input(case.dy, values, case.p, config)
    assert error(y, case.y) < case.limit
    assert error(dx, case.dx) < case.limit


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("group", [1, 2, 7])
def test_tile_groups_do_not_change_results(group):
    case = Case(32, (3, 4), 200, torch.bfloat16)
    values = case.values.bfloat16()
    first = launch.forward(case.x, values, case.p, case.bias, Rows(64, 64, 4, 3))
    config = Rows(64, 64, 4, 3, group=group)
    assert torch.equal(launch.forward(case.x, values, case.p, case.bias, config), first)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize(
    ("b", "number", "samples", "tma"), list(itertools.chain(*map(shares, BLOCKS)))
)
def test_every_split_of_the_gradient(b, number, samples, tma, split):
    case = Case(b, (3, 4), 2 * samples + 9, torch.bfloat16, without=2)
    config = Gradient(number, samples, 4, 3, split, tma)
    sums = []
    dw = launch.grad_weight(case.dy, case.x, case.p, torch.float32, config, sums)
    assert error(dw, case.dw) < 1e-6
    assert error(sums[0], case.dy.double().sum(0)) < 1e-6


@pytest.mark.parametrize(
    ("capability", "table"),
    [
        *((c, OTHERS) for c in ((8, 0), (8, 6), (8, 9), (10, 0), (11, 0), (12, 0), (13, 0))),
        ((9, 0), HOPPER),
    ],
)
def test_every_capability_has_configurations(capability, table):
    chip = Chip(capability, 100, 40 << 20)
    for b, dtype in itertools.product(BLOCKS, DTYPES):
        numbers = numbers_of(dtype)
        assert choose_rows(b, dtype, 8192, 64, chip) == table[numbers].rows[b][0]
        assert choose_gradient(b, dtype, 4096, 64, 8192, chip) == table[numbers].gradient[b]


def test_small_layers_and_batches_use_small_tiles():
    """Fewer than four large tiles per multiprocessor (132) are too few."""
    wide, narrow = HOPPER["16-bit"].rows[64]
    assert choose_rows(64, torch.bfloat16, 8192, 64, INTERPRETED) == wide
    assert choose_rows(64, torch.bfloat16, 512, 16, INTERPRETED) == narrow
    assert choose_rows(64, torch.bfloat16, 132 * 128, 4, INTERPRETED) == wide
    assert choose_rows(64, torch.bfloat16, 131 * 128, 4, INTERPRETED) == narrow


def test_tiles_of_growth_fit_into_a_third_of_the_cache():
    assert growth.group_of(4096, torch.bfloat16, INTERPRETED) == 8
    assert growth.group_of(16384, torch.bfloat16, INTERPRETED) == 5
    assert growth.group_of(1 << 20, torch.float32, INTERPRETED) == 1


@pytest.mark.parametrize(
    ("b", "density", "split"),
    [
        (128, 0.1, 1), (64, 0.1, 1), (32, 0.1, 1), (16, 0.1, 1),
        (128, 0.06, 2), (128, 0.02, 4), (128, 0.0, 8), (64, 0.01, 2),
    ],
)  # fmt: skip
def test_few_programs_share_the_samples(b, density, split):
    # 4096 features: 61 blocks of 128 leave half of 132 multiprocessors idle, 102 do not.
    rows = 4096 // b
    nnz = round(rows * rows * density)
    assert choose_gradient(b, torch.bfloat16, nnz, rows, 8192, INTERPRETED).split == split


@pytest.mark.parametrize("batch", [1, 64, 500, 1023])
def test_few_samples_are_not_shared_by_many(batch):
    c = choose_gradient(128, torch.bfloat16, 4, 32, batch, INTERPRETED)
    assert c.split <= max(1, batch // (4 * c.samples))
