"""The formula for GPUs against figures worked out by hand, and what it chooses."""

from __future__ import annotations

import itertools

import pytest
import torch

from dynsparse.ops.linear.costs import Layer
from dynsparse.ops.linear.cuda.chip import INTERPRETED, Chip
from dynsparse.ops.linear.cuda.costs import KINDS, PASSES, bounds, choose, product, seconds
from dynsparse.ops.linear.cuda.rates import RATES, rates_of

H200 = RATES["90"]


def layer(n: int, density: float, b: int) -> Layer:
    return Layer(n, n, round(density * (n // b) ** 2), b)


# Microseconds of an H200 at n 4096, batch 8192, density 0.1, 16-bit: arithmetic, operands, memory,
# cache forward and for the gradient of the weight; the most times faster than dense, likewise.
FIGURES = {
    4: (35, 296, 32, 720, 720, 0.5, 0.5),
    8: (35, 157, 32, 365, 365, 1.0, 1.0),
    16: (35, 87, 32, 188, 188, 1.8, 1.8),
    32: (35, 52, 32, 100, 100, 3.5, 3.5),
    64: (35, 35, 32, 55, 55, 6.3, 6.3),
    128: (35, 35, 32, 44, 33, 7.9, 10.0),
}


@pytest.mark.parametrize("b", FIGURES)
def test_bounds_of_a_large_layer(b):
    at = layer(4096, 0.1, b)
    forward, weight = (bounds(at, 8192, p, "16-bit", H200) for p in ("forward", "grad_weight"))
    dense = product(at, 8192, "16-bit", H200)
    assert round(dense * 1e6) == 348
    found = [*(round(t * 1e6) for t in (*forward, weight.cache))]
    assert found == list(FIGURES[b][:5])
    assert bounds(at, 8192, "grad_input", "16-bit", H200) == forward
    assert round(dense / forward.least, 1) == FIGURES[b][5]
    assert round(dense / weight.least, 1) == FIGURES[b][6]
    assert weight[:3] == forward[:3]


def test_single_elements_are_bound_by_the_cache():
    found = bounds(layer(4096, 0.1, 1), 8192, "forward", "16-bit", H200)
    assert round(found.cache * 1e6) == 2845
    assert found.name == "cache"


@pytest.mark.parametrize(
    ("n", "density", "ratios"),
    [(4096, 0.05, (3.7, 7.0, 11, 11)), (2048, 0.1, (1.8, 3.5, 5.5, 5.5))],
)
def test_other_sizes(n, density, ratios):
    for b, ratio in zip((16, 32, 64, 128), ratios, strict=True):
        at = layer(n, density, b)
        found = (
            product(at, 8192, "16-bit", H200) / bounds(at, 8192, "forward", "16-bit", H200).least
        )
        assert found == pytest.approx(ratio, rel=0.03)


@pytest.mark.parametrize("batch", [4096, 16384])
def test_bounds_grow_with_the_batch(batch):
    for b in FIGURES:
        at = layer(4096, 0.1, b)
        for what in PASSES:
            one, other = (bounds(at, n, what, "16-bit", H200) for n in (8192, batch))
            assert other.cache == pytest.approx(one.cache * batch / 8192)
            assert other.arithmetic == pytest.approx(one.arithmetic * batch / 8192)


def test_float32():
    at = layer(4096, 0.1, 64)
    fast, exact = (bounds(at, 8192, "forward", numbers, H200) for numbers in ("tf32", "tf32x3"))
    assert round(product(at, 8192, "tf32", H200) * 1e6) == 696
    assert round(fast.cache * 1e6) == 111
    assert product(at, 8192, "tf32", H200) / fast.least == pytest.approx(6.3, abs=0.05)
    assert product(at, 8192, "tf32x3", H200) * 1e6 == pytest.approx(5300, rel=0.01)
    assert round(exact.arithmetic * 1e6) == 209
    assert product(at, 8192, "tf32x3", H200) / exact.least == pytest.approx(25, abs=0.5)


def test_what_is_expected_of_first_kernels():
    """60 % of the bound and 5 us."""
    for b, expected in ((64, 97), (32, 171), (16, 319)):
        found = seconds("blocks", layer(4096, 0.1, b), 8192, "forward", "16-bit", H200)
        assert round(found * 1e6) == expected
    # Laying the weight out takes about 20 us, collecting its gradient likewise, masks 39 us in all.
    at, dense = layer(4096, 0.1, 1), product(layer(4096, 0.1, 1), 8192, "16-bit", H200)
    for what, low, high in (("forward", 15, 25), ("grad_input", 0, 5), ("grad_weight", 15, 30)):
        beside = seconds("dense", at, 8192, what, "16-bit", H200) - dense
        assert low < beside * 1e6 < high
    # With fewer samples than features forward does not keep the weight for the backward pass.
    beside = seconds("dense", at, 4000, "grad_input", "16-bit", H200) - dense * 4000 / 8192
    assert 15 < beside * 1e6 < 25
    masks = sum(seconds("masked", at, 8192, what, "16-bit", H200) for what in PASSES) - 3 * dense
    assert 39 < masks * 1e6 < 51


def test_gradients_that_are_collected_from_several_panels_cost_no_more():
    """Each panel is asked for its own rows alone; up to 256 MiB of float32 it is one."""

    def beside(n):
        at = layer(n, 0.1, 1)
        return (
            seconds("dense", at, 8192, "grad_weight", "16-bit", H200)
            - product(at, 8192, "16-bit", H200)
        ) / n**2

    assert beside(8192) < beside(4096)
    assert beside(16384) == pytest.approx(beside(8192), rel=0.01)


def test_where_lines_are_kept_kernels_are_launched_faster():
    """524,288 lines, of a gradient that is one panel."""
    for at, own in ((layer(2048, 0.125, 1), 0), (layer(2048, 0.126, 1), 1)):
        forward = seconds("dense", at, 1, "forward", "16-bit", H200)
        assert forward == pytest.approx(15e-6 + own * 10e-6)
    wide = layer(16384, 0.001, 1)
    assert seconds("dense", wide, 1, "grad_weight", "16-bit", H200) >= 4 * (5e-6 + 15e-6)


def test_density_where_dense_catches_up():
    """At 60 % of the bounds: 0.0074 times the block's size."""
    for b, even in ((16, 0.12), (32, 0.24), (64, 0.47)):
        densities = [d / 100 for d in range(1, 101)]
        last = max(
            d
            for d in densities
            if bounds(layer(4096, d, b), 8192, "forward", "16-bit", H200).least / 0.6
            < product(layer(4096, d, b), 8192, "16-bit", H200)
        )
        # The weights' own reading, which that figure leaves out, costs the larger blocks a little.
        assert even * 0.75 < last <= even + 0.01


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
    # Starting kernels costs more than so small a product.
    assert "dense" in chosen(256, 0.5, 64, 16)
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        assert chosen(4096, 0.1, 64, chip=Chip(capability, 100, 40 << 20)) == {"blocks"}


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_the_choice_turns_to_dense_once_as_density_grows(capability):
    chip = Chip(capability, 132, 50 << 20)
    for b, backward, batch in itertools.product((16, 32, 64, 128), (False, True), (512, 8192)):
        kinds = [
            choose(layer(4096, d / 50, b), batch, backward, torch.bfloat16, chip)
            for d in range(1, 51)
        ]
        assert sum(a != b for a, b in itertools.pairwise(kinds)) <= 1
        assert kinds[0] == "blocks"


def test_no_chosen_layer_is_expected_to_be_slower_than_the_other_kind():
    for n, batch, density, b in itertools.product(
        (1024, 4096), (512, 8192), (0.01, 0.1, 0.5), (16, 64)
    ):
        at = layer(n, density, b)
        for backward, passes in ((False, PASSES[:1]), (True, PASSES[1:])):
            times = {
                kind: sum(seconds(kind, at, batch, p, "16-bit", H200) for p in passes)
                for kind in KINDS
            }
            kind = choose(at, batch, backward, torch.bfloat16, INTERPRETED)
            assert times[kind] == min(times.values())


def test_rates_are_those_of_the_chip_at_hand():
    assert rates_of(INTERPRETED) == H200
    half = rates_of(Chip((9, 0), 66, 25 << 20))
    assert half.cache == H200.cache / 2
    assert half.products["16-bit"] == H200.products["16-bit"] / 2
    assert half.memory == H200.memory
    assert rates_of(Chip((8, 6), 142, 6 << 20)).name == "L40"


def test_graphs_take_the_launches_away():
    at = layer(1024, 0.1, 64)
    for kind in (*KINDS, "masked"):
        launched, captured = (
            seconds(kind, at, 16, "forward", "16-bit", H200, captured=c) for c in (False, True)
        )
        assert captured < launched
