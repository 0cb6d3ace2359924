"""Every configuration computes the same; which one is taken."""

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
    gradient_for,
    group_of,
    rows_for,
)

TABLES = [*HOPPER.values(), *OTHERS.values()]


def tiles(b):
    """Of the tables and candidates, what the interpreter can tell apart."""
    known = [c for table in TABLES for c in table.rows[b]]
    known += [c for candidates in compiled.ROWS.values() for c in candidates[b]]
    return [(b, *tile) for tile in sorted({(c.samples, c.inputs) for c in known})]


def shares(b):
    known = [table.gradient[b] for table in TABLES]
    known += [c for candidates in compiled.GRADIENT.values() for c in candidates[b]]
    return [(b, *share) for share in sorted({(c.blocks, c.samples) for c in known})]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("b", "samples", "inputs"), list(itertools.chain(*map(tiles, BLOCKS))))
def test_every_tile(b, samples, inputs):
    case = Case(b, (2, 5), samples + 5, torch.bfloat16, without=1)
    config = Rows(samples, inputs, 4, 3)
    values = case.values.bfloat16()
    y = launch.forward(case.x, values, case.p, case.bias, config)
    dx = launch.grad_input(case.dy, values, case.p, config)
    assert error(y, case.y) < case.limit
    assert error(dx, case.dx) < case.limit


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("group", [1, 2, 7])
def test_groups_of_tiles_change_no_bits(group):
    case = Case(32, (3, 4), 200, torch.bfloat16)
    values = case.values.bfloat16()
    first = launch.forward(case.x, values, case.p, case.bias, Rows(64, 64, 4, 3))
    config = Rows(64, 64, 4, 3, group=group)
    assert torch.equal(launch.forward(case.x, values, case.p, case.bias, config), first)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("terms", [32, 64, 1024])
def test_sums_of_float32_that_end(monkeypatch, terms):
    """Every entry counts once, wherever sums end."""
    monkeypatch.setattr(launch, "TERMS", terms)
    monkeypatch.setattr(growth, "TERMS", terms)
    case = Case(16, (3, 9), 100, torch.float32, density=0.7, without=1)
    y = launch.forward(case.x, case.values, case.p, case.bias)
    dx = launch.grad_input(case.dy, case.values, case.p)
    dw = launch.grad_weight(case.dy, case.x, case.p, torch.float32)
    assert error(y, case.y) < case.limit
    assert error(dx, case.dx) < case.limit
    assert error(dw, case.dw) < case.limit
    scores = growth.block_scores([case.dy], [case.x], 16, "sum")
    wanted = (case.dy.double().t() @ case.x.double()).abs().view(3, 16, 9, 16).sum((1, 3))
    assert error(scores, wanted) < 1e-6


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize(("b", "number", "samples"), list(itertools.chain(*map(shares, BLOCKS))))
def test_every_share_of_the_gradient(b, number, samples, split):
    case = Case(b, (3, 4), 2 * samples + 9, torch.bfloat16, without=2)
    config = Gradient(number, samples, 4, 3, split)
    dw = launch.grad_weight(case.dy, case.x, case.p, torch.float32, config)
    assert error(dw, case.dw) < 1e-6


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
        assert rows_for(b, dtype, 8192, 64, chip) == table[numbers].rows[b][0]
        assert gradient_for(b, dtype, 4096, 64, 8192, chip) == table[numbers].gradient[b]


def test_what_is_derived_of_an_index_serves_every_type():
    """`blocks.derive` makes one list of chunks."""
    for tables, b in itertools.product((HOPPER, OTHERS), BLOCKS):
        assert len({table.gradient[b].blocks for table in tables.values()}) == 1


def test_small_layers_and_batches_take_small_tiles():
    wide, narrow = HOPPER["16-bit"].rows[64]
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
    [(128, 0.1, 2), (64, 0.1, 1), (32, 0.1, 1), (16, 0.1, 1), (128, 0.04, 4), (128, 0.0, 8)],
)
def test_few_programs_share_the_samples(b, density, split):
    # 4096 features: 102 blocks of 128 would leave multiprocessors idle.
    rows = 4096 // b
    nnz = round(rows * rows * density)
    assert gradient_for(b, torch.bfloat16, nnz, rows, 8192, INTERPRETED).split == split


@pytest.mark.parametrize("batch", [1, 64, 500, 1023])
def test_few_samples_are_not_shared_by_many(batch):
    c = gradient_for(128, torch.bfloat16, 4, 32, batch, INTERPRETED)
    assert c.split <= max(1, batch // (4 * c.samples))
