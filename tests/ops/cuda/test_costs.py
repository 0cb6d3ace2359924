"""The cost formula for GPUs, compared with hand-computed figures, and its choices."""

from __future__ import annotations

import itertools

import pytest
import torch

from dynsparse.ops.linear.cost_table import Layer
from dynsparse.ops.linear.cuda.chip import INTERPRETED, Chip
from dynsparse.ops.linear.cuda.configurations import Gradient, Rows
from dynsparse.ops.linear.cuda.costs import (
    B200,
    H100,
    PASSES,
    bounds,
    choose,
    config_of,
    dense_seconds,
    rates_of,
    seconds,
)

HALF = torch.bfloat16


def layer(n: int, density: float, b: int) -> Layer:
    return Layer(n, n, round(density * (n // b) ** 2), b)


# Microseconds of an H100 at n 4096, batch 8192, density 0.1, 16 bits: arithmetic, operands, memory,
# cache forward with tiles of 256 samples (128 for blocks of 128), and for the weight's gradient
# with blocks of a row together that are 256 wide.
FIGURES = {
    4: (34, 292, 46, 720, 723),
    8: (34, 155, 46, 365, 369),
    16: (34, 86, 46, 188, 191),
    32: (34, 52, 46, 100, 103),
    64: (34, 34, 46, 55, 58),
    128: (34, 34, 46, 44, 35),
}


def of(b):
    return Rows(256 if b < 128 else 128, 64, 8, 2), Gradient(256 // b, 64, 8, 2)


@pytest.mark.parametrize("b", FIGURES)
def test_bounds_of_a_large_layer(b):
    at = layer(4096, 0.1, b)
    forward, weight = (bounds(at, 8192, c, "16-bit", H100) for c in of(b))
    assert round(dense_seconds(at, 8192, "16-bit", H100) * 1e6) == 344
    assert [round(t * 1e6) for t in (*forward, weight.cache)] == list(FIGURES[b])
    assert weight[:3] == forward[:3]
    assert forward.largest == max(forward)


def test_bounds_use_the_chosen_configuration():
    """By hand: 410 blocks of 64, 8192 samples, tiles of 128, two blocks of a row together."""
    at = layer(4096, 0.1, 64)
    forward, weight = (config_of(at, 8192, what, HALF, INTERPRETED) for what in PASSES[::2])
    assert (forward.samples, weight.blocks) == (128, 2)
    x = 410 * 8192 * 64 * 2
    values = 410 * 64 * 64 * 2
    cache = bounds(at, 8192, forward, "16-bit", H100).cache * H100.cache
    assert cache == pytest.approx(x + 64 * values)
    cache = bounds(at, 8192, weight, "16-bit", H100).cache * H100.cache
    assert cache == pytest.approx(x + (410 + 64 / 2) / 2 * 8192 * 64 * 2)


def test_single_elements_are_bound_by_the_cache():
    found = bounds(layer(4096, 0.1, 1), 8192, of(1)[0], "16-bit", H100)
    assert round(found.cache * 1e6) == 2845
    assert found.name == "cache"


def test_float32():
    at, config = layer(4096, 0.1, 64), of(64)[0]
    fast, exact = (bounds(at, 8192, config, numbers, H100) for numbers in ("tf32", "tf32x3"))
    assert round(dense_seconds(at, 8192, "tf32", H100) * 1e6) == 833
    assert round(fast.cache * 1e6) == 111
    assert dense_seconds(at, 8192, "tf32x3", H100) * 1e6 == pytest.approx(5300, rel=0.01)
    assert round(exact.arithmetic * 1e6) == 206


def test_expected_times():
    """The bound over the achieved fraction, plus 5 us; laying out the weight and gathering its
    gradient add 20 to 35 us to the product."""
    for b in (16, 32, 64, 128):
        at = layer(4096, 0.1, b)
        config = config_of(at, 8192, "forward", HALF, INTERPRETED)
        least = bounds(at, 8192, config, "16-bit", H100).largest
        found = seconds("blocks", at, 8192, "forward", HALF, INTERPRETED)
        assert found == pytest.approx(least / H100.share["16-bit"][b][0] + 5e-6)
    at, dense = layer(4096, 0.1, 1), dense_seconds(layer(4096, 0.1, 1), 8192, "16-bit", H100)
    for what, low, high in (("forward", 15, 25), ("grad_input", 0, 5), ("grad_weight", 15, 35)):
        beside = seconds("dense", at, 8192, what, HALF, INTERPRETED) - dense
        assert low < beside * 1e6 < high
    # With fewer samples than features forward does not keep the weight for the backward pass.
    beside = seconds("dense", at, 4000, "grad_input", HALF, INTERPRETED) - dense * 4000 / 8192
    assert 15 < beside * 1e6 < 25
    full = layer(4096, 1.0, 1)
    dense = dense_seconds(full, 8192, "16-bit", H100)
    assert seconds("dense", full, 8192, "forward", HALF, INTERPRETED) == pytest.approx(dense + 3e-6)


def test_few_blocks_are_bound_by_their_steps():
    """2 blocks of 128 over 8192 samples: 8 splits of 16 steps, then a sum."""
    at = Layer(256, 256, 2, 128)
    config = config_of(at, 8192, "grad_weight", HALF, INTERPRETED)
    assert (config.split, config.samples) == (8, 64)
    found = seconds("blocks", at, 8192, "grad_weight", HALF, INTERPRETED)
    assert found == pytest.approx(16 * 0.4e-6 + 2 * 5e-6)


def test_the_choice():
    def chosen(n, density, b, batch=8192, dtype=torch.bfloat16, chip=INTERPRETED):
        return {choose(layer(n, density, b), batch, way, dtype, chip) for way in (False, True)}

    for b in (1, 4, 8, 48):
        assert chosen(4800, 0.1, b) == {"dense"}
    for b in (32, 64, 128):
        assert chosen(4096, 0.1, b) == {"blocks"}
        assert chosen(4096, 1.0, b) == {"dense"}
    assert chosen(4096, 0.05, 16) == {"blocks"}
    assert chosen(4096, 0.3, 16) == {"dense"}
    assert chosen(4096, 0.1, 64, dtype=torch.float64) == {"dense"}
    # cuBLAS without TF32 is far slower than three products of it.
    assert chosen(4096, 0.5, 64, dtype=torch.float32) == {"blocks"}
    # One kernel is started in place of two.
    assert chosen(256, 0.5, 64, 16) == {"blocks"}
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        assert chosen(4096, 0.1, 64, chip=Chip(capability, 100, 40 << 20)) == {"blocks"}


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_choice_switches_to_dense_once_with_density(capability):
    chip = Chip(capability, 132, 50 << 20)
    for b, backward, batch in itertools.product((16, 32, 64, 128), (False, True), (512, 8192)):
        kinds = [
            choose(layer(4096, d / 50, b), batch, backward, torch.bfloat16, chip)
            for d in range(1, 51)
        ]
        assert sum(a != b for a, b in itertools.pairwise(kinds)) <= 1
        assert kinds[0] == "blocks"


def test_rates_of_the_current_chip():
    assert rates_of(INTERPRETED) == H100
    half = rates_of(Chip((9, 0), 66, 25 << 20))
    assert half.cache == H100.cache / 2
    assert half.products["16-bit"] == H100.products["16-bit"] / 2
    assert half.memory == H100.memory
    other = rates_of(Chip((8, 6), 74, 6 << 20))
    assert (other.name, other.cache) == ("B200", B200.cache / 2)
