"""The figures of docs/popsparse-fidelity.md equal those of the model."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from popsparse.machine import target as facts

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "popsparse-fidelity.md"
pytestmark = pytest.mark.skipif(
    not PAGE.exists(), reason="docs and benchmarks are no part of wheels"
)


def tables(first):
    """Return the rows of all tables on the page whose header starts with these columns."""
    found = re.findall(r"((?:^\|.*\n)+)", PAGE.read_text(encoding="utf-8"), re.M)
    chosen = [table.splitlines() for table in found if table.startswith(f"| {first} |")]
    assert chosen
    return [line for table in chosen for line in table[2:]]


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture(scope="module")
def benchmark():
    return runpy.run_path(str(ROOT / "benchmarks" / "fidelity.py"), run_name="fidelity")


def test_facts_equal_the_code():
    of_code = [fact for fact in vars(facts).values() if isinstance(fact, facts.Fact)]
    shown = [cells(line) for line in tables("fact | low")]
    expected = [
        [fact.name, *(f"{end:,.0f}" for end in (fact.low, fact.typical, fact.high)), fact.unit]
        for fact in of_code
    ]
    assert sorted(shown) == sorted(expected)
    for fact in of_code:
        assert fact.low <= fact.typical <= fact.high
        assert re.match(r"\[[VTMI]\] ", fact.source)


def test_published_numbers_equal_the_fields_of_targets():
    bow, four = facts.Target.bow(), facts.Target.pod(4)
    links = sum(f.typical for f in (facts.PAIR_LINKS, facts.CROSS_LINKS, facts.RAIL_LINKS))
    links += facts.RAIL_LINKS.typical  # up and down
    assert links == 10
    flops = [bow.tiles * bow.peak_flops(dtype) * bow.clock_hz for dtype in ("half", "float")]
    computed = [
        ("tiles", four.tiles, "{:,.0f}"),
        ("threads", four.tiles * four.workers, "{:,.0f}"),
        ("memory of the tiles", bow.tiles * bow.bytes_per_tile / 2**20, "{:.0f}"),
        (
            "memory bandwidth",
            bow.tiles * 3 * bow.data_path_bits / 8 * bow.clock_hz / 1e12,
            "{:.1f}",
        ),
        ("exchange", bow.tiles * bow.exchange_bytes_per_cycle * bow.clock_hz / 1e12, "{:.1f}"),
        ("float16", flops[0] / 1e12, "{:.1f}"),
        ("float32", flops[1] / 1e12, "{:.1f}"),
        ("float16", four.processors * flops[0] / 1e15, "{:.2f}"),
        ("links", links * 2 * bow.link_bytes_per_second / 1e9, "{:.0f}"),
        ("streaming memory", four.processors * four.remote_bytes / 1e9, "{:.0f}"),
    ]
    shown = [cells(line) for line in tables("number | processors")]
    assert [(row[0], row[3]) for row in shown] == [(n, form.format(x)) for n, x, form in computed]
    for name, _, published, of_model, *_ in shown:
        said, found = (float(text.replace(",", "")) for text in (published, of_model))
        assert found == pytest.approx(said, rel=0.2 if name == "links" else 0.01)


def rows(first, most):
    """Return the rows with m = k of at most `most`."""
    place = first.split(" | ").index("m = k")
    return [line for line in tables(first) if int(cells(line)[place]) <= most]


def static_again(benchmark, line):
    block, size, density = cells(line)[:3]
    return benchmark["static_row"](int(block), int(size), int(density[2:]))


@pytest.mark.slow
def test_static_products(benchmark):
    for line in rows("block | m = k | density", 1024):
        assert static_again(benchmark, line) == line


@pytest.mark.slow
def test_larger_static_products(benchmark):
    for line in rows("block | m = k | density", 4096):
        if int(cells(line)[0]) > 1 and int(cells(line)[1]) > 1024:
            assert static_again(benchmark, line) == line


@pytest.mark.slow
def test_dense_products(benchmark):
    for line in rows("m = k | n | before", 1024):
        size, n = map(int, cells(line)[:2])
        assert benchmark["dense_row"](size, n) == line


def test_dynamic_products(benchmark):
    for line in rows("block | m = k | n | before", 1024):
        block, size, n = map(int, cells(line)[:3])
        assert benchmark["dynamic_row"](block, size, n) == line


@pytest.mark.slow
def test_memory_of_the_largest(benchmark):
    """The elements of m = k = 8192 take minutes; this checks the sums of the row."""
    for line in tables("m = k | block | n | data"):
        size, block, n, *figures = [int(cell.replace(",", "")) for cell in cells(line)]
        if (size, block) != (8192, 1):
            density = {1: 4, 16: 16}[block]
            assert benchmark["memory_row"](size, block, density, n) == line
        data, *kinds, _, typical, high, copies, worst, left = figures
        assert typical == data + sum(kinds)
        assert worst == high + copies + 2 * 32 * 1024
        assert left == 638_976 - worst
        if left < 0:
            said = re.search(r"it is ([\d,]+) bytes over", PAGE.read_text(encoding="utf-8"))
            assert said.group(1) == f"{-left:,}"


def test_medians_in_the_text():
    text = PAGE.read_text(encoding="utf-8")
    for first, said in (
        ("block | m = k | density", r"In the median (\+\d+) %"),
        ("block | m = k | n | before", r"the median changes by (\+\d+) %"),
    ):
        changes = [int(cells(line)[-1].rstrip("%")) for line in tables(first)]
        assert int(re.search(said, text).group(1)) == round(float(np.median(changes)))


def test_imbalance_of_the_sums(benchmark):
    plan = benchmark["static_plan"](4096, 8, 16, 256)
    sums, tiles = plan.sums, plan.target.tiles
    pieces = np.bincount(sums.tile, minlength=tiles)
    assert round(pieces.mean()) == 45
    load = np.bincount(sums.tile, sums.length * sums.depth, tiles)
    assert round(load.max() / load.mean(), 1) == 1.4
