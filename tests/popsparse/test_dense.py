"""Plans of dense products: a golden plan, optimality by brute force, and errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from popsparse import dense
from popsparse.machine import Engine, Graph, Sequence
from popsparse.machine.dtypes import FLOAT, HALF
from popsparse.machine.target import Target
from popsparse.planning.cycles import AMP
from popsparse.planning.dense import Cut, least_cycles, price, tile_bytes
from popsparse.planning.params import all_partitions, even_parts
from popsparse.programs.dense import Layout, add_product, create_operand


def test_golden_plan():
    found = dense.plan(4096, 4096, 256, "float16", Target.bow(sync_cycles=0))
    assert found.swapped
    assert found.method == "amp 16 units 16x16"
    assert (found.field, found.out, found.in_) == (1, 86, 16)
    assert (found.serial_out, found.serial_in) == (1, 1)
    assert found.terms == {
        "field exchange": 16194,
        "partial exchange": 6144,
        "reduction exchange": 1536,
        "compute": 59873,
        "reduction": 7506,
    }
    assert found.cycles == 91253
    assert found.temporary_bytes == 180224
    assert round(found.tflops) == 174


def test_sync_is_paid_by_phase():
    quiet, loud = (dense.plan(512, 512, 64, "float16", Target.mk2(sync_cycles=s)) for s in (0, 300))
    assert loud.cycles == quiet.cycles + 300 * quiet.phases
    assert loud.terms == quiet.terms


def test_float_partials_are_slower():
    half = dense.plan(1024, 1024, 1024, "float16", Target.bow())
    single = dense.plan(1024, 1024, 1024, "float16", Target.bow(), partials="float32")
    assert single.cycles > 1.3 * half.cycles


def test_memory_proportion_trades_time():
    tight, roomy = (
        dense.plan(2048, 2048, 2048, "float16", Target.mk2(), available_memory_proportion=p)
        for p in (0.1, 0.9)
    )
    assert tight.cycles > roomy.cycles
    assert tight.temporary_bytes <= 0.1 * Target.mk2().bytes_per_tile


@settings(deadline=None, max_examples=10)
@given(
    st.integers(1, 70),
    st.integers(1, 50),
    st.integers(1, 40),
    st.sampled_from(["float16", "float32"]),
    st.sampled_from([1, 4, 12]),
)
def test_plan_is_optimal(m, k, n, dtype, tiles):
    """No split over (field, out, in) with full parts is faster."""
    target = Target(tiles=tiles)
    found = dense.plan(m, k, n, dtype, target)
    kind = HALF if dtype == "float16" else FLOAT
    vertex = AMP(16, 16, 16) if kind is HALF else AMP(16, 8, 16)
    sizes = (n, -(-m // vertex.out_channels), -(-k // vertex.in_channels))
    splits = all_partitions(tiles)
    filled = [even_parts(size, parts) == parts for size, parts in zip(sizes, splits, strict=True)]
    splits = splits[:, np.logical_and.reduce(filled)]
    cut = Cut(vertex, True, n, m, k, splits, 1, 1, False)
    terms = price(cut, kind, kind, target)
    assert found.planned_cycles <= terms.cycles.min()
    assert (terms.cycles >= np.floor(least_cycles(cut, kind, target))).all()
    assert (terms.bytes >= tile_bytes(cut, kind, kind)).all()


def test_operands_too_large_for_the_machine():
    with pytest.raises(ValueError, match=r"a dense 8192x8192 by .* bytes a tile, the target has"):
        dense.plan(8192, 8192, 16384, "float16", Target.mk2())


def test_partials_narrower_than_data():
    with pytest.raises(ValueError, match="partials must be at least as wide as the data"):
        dense.plan(8, 8, 8, "float32", Target.mk2(), partials="float16")


def simulated(plan):
    """Run a plan without numerics, with operands mapped as the plan expects."""
    graph, program = Graph(plan.target), Sequence()
    layout = Layout(plan)
    a, b = (create_operand(graph, layout, which, which) for which in "ab")
    add_product(graph, layout, a, b, program, "product")
    return Engine(graph, program, numerics=False).run()


@pytest.mark.parametrize(("m", "k", "n"), [(256, 256, 256), (1024, 1024, 64)])
def test_links_between_processors_are_estimated(m, k, n):
    pod = Target.pod(2, tiles=32)
    plan = dense.plan(m, k, n, "float16", pod)
    assert plan.tiles_used > pod.processor_tiles
    run = simulated(plan)
    crossing = sum(step.exchange for step in run.steps if step.link_bytes)
    assert plan.terms["links"] == pytest.approx(crossing, abs=1)
    assert plan.sync_cycles == plan.phases * pod.link_sync_cycles
    assert plan.cycles == pytest.approx(run.cycles, rel=0.05)


def test_plan_uses_one_processor_if_links_are_too_slow():
    pod = Target.pod(4, tiles=128)
    plan = dense.plan(256, 256, 256, "float16", pod)
    alone = dense.plan(256, 256, 256, "float16", pod.share(4))
    assert (plan.tiles_used, plan.terms, plan.cycles) == (128, alone.terms, alone.cycles)
    assert simulated(plan).link_bytes == 0
    fast = dense.plan(256, 256, 256, "float16", pod.with_(link_bytes_per_second=1e15))
    assert fast.tiles_used > 128
