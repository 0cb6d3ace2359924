"""Dense products on the machine: results, and the error of the planner's estimate."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from popsparse import dense
from popsparse.machine import Engine, Graph, Sequence, Target
from popsparse.planning.cycles import AMP, HMAC, reduce_stage, reduction_depths
from popsparse.programs.dense import Layout, add_product, create_operand

FREE = settings(deadline=None, max_examples=30)


def run(plan, target, *, groups=1, transposed=(False, False), foreign=False, numerics=True):
    """Run the product of a plan on the machine; return (result, exact result, profile)."""
    graph, program = Graph(target), Sequence()
    layout = Layout(plan, groups)
    rng = np.random.default_rng(0)
    shapes = ((groups, plan.m, plan.k), (groups, plan.k, plan.n))
    # Whole numbers, so that float16 sums of many are exact.
    arrays = [rng.integers(-1, 2, shape).astype(plan.dtype.name) for shape in shapes]
    operands = []
    for which, array, turn in zip("ab", arrays, transposed, strict=True):
        if foreign:
            shape = array.swapaxes(1, 2).shape if turn else array.shape
            operands.append(graph.add_variable(plan.dtype.name, shape, which))
            graph.map_linearly(operands[-1])
        else:
            operands.append(create_operand(graph, layout, which, which, transposed=turn))
    result = add_product(graph, layout, *operands, program, "product", transposed=transposed)
    engine = Engine(graph, program, numerics=numerics)
    if not numerics:
        return None, None, engine.run()
    for one, array, turn in zip(operands, arrays, transposed, strict=True):
        given_array = array.swapaxes(1, 2) if turn else array
        engine.write(one, given_array)
    profile = engine.run()
    found = engine.read(result)
    a, b = (array.astype(np.float64) for array in arrays)
    return found, a @ b, profile


@FREE
@given(
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 90), st.integers(1, 40)),
    types=st.sampled_from([("float16", "float16"), ("float16", "float32"), ("float32", "float32")]),
    tiles=st.sampled_from([1, 2, 5, 24, 60]),
    groups=st.sampled_from([1, 2]),
    transposed=st.tuples(st.booleans(), st.booleans()),
    foreign=st.booleans(),
)
def test_any_product(sizes, types, tiles, groups, transposed, foreign):
    dtype, partials = types
    plan = dense.plan(*sizes, dtype, Target(tiles=tiles), partials=partials)
    target = Target(tiles=tiles * groups)
    found, exact, profile = run(plan, target, groups=groups, transposed=transposed, foreign=foreign)
    np.testing.assert_array_equal(found, exact)
    assert profile.step("dense product").compute == plan.terms["compute"]


# Plans a search gives for large products only: every kind of split, vertex and orientation.
@FREE
@given(
    swapped=st.booleans(),
    vertex=st.sampled_from([AMP(16, 16, 16), AMP(8, 16, 8), HMAC(10, 2), HMAC(4, 1)]),
    parts=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 20)),
    serial=st.sampled_from([(1, 1), (2, 1), (5, 1), (1, 2), (1, 3)]),
    once=st.booleans(),
    partials=st.sampled_from(["float16", "float32"]),
    transposed=st.tuples(st.booleans(), st.booleans()),
)
def test_any_plan(swapped, vertex, parts, serial, once, partials, transposed):
    field, out, in_ = parts
    target = Target(tiles=field * out * in_)
    plan = replace(
        dense.plan(45, 190, 52, "float16", target, partials=partials),
        swapped=swapped,
        vertex=vertex,
        field=field,
        out=out,
        in_=in_,
        serial_out=serial[0],
        serial_in=serial[1],
        broadcast_once=once and serial[0] > 1,
    )
    found, exact, profile = run(plan, target, transposed=transposed)
    np.testing.assert_array_equal(found, exact)
    steps = [step for step in profile.steps if step.name.endswith("dense product")]
    assert [step.runs for step in steps] == [max(serial)]


def test_reduction_in_three_stages():
    """125 partial sums of 2000 outputs: depths and cycles equal the planner's."""
    target = Target(tiles=125)
    plan = replace(dense.plan(16, 2000, 125, "float16", target), field=1, out=1, in_=125)
    found, exact, profile = run(plan, target)
    np.testing.assert_array_equal(found, exact)
    left, outputs, expected = 125, 2000, []
    for wanted in (*reduction_depths(125), 1):
        depth = -(-left // wanted)
        outputs, left = outputs // depth, left // depth
        more = (plan.partials, plan.dtype, target.workers, target.bytes_per_tile)
        expected.append(reduce_stage(outputs, depth, *more))
    stages = [step.compute for step in profile.steps if "/reduce" in step.name]
    assert (left, outputs) == (1, 16)
    assert stages == expected
    assert len(stages) == 3


BOW = Target.bow()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("size", [256, 1024, pytest.param(4096, marks=pytest.mark.slow)])
def test_estimate_and_run_agree(size, dtype):
    """The planner counts all partial sums, although a tile keeps its own, and a sync per slice; it
    ignores local copies on a tile."""
    for n in (4, 16, 64, 256, 1024, 4096):
        plan = dense.plan(size, size, n, dtype, BOW)
        *_, profile = run(plan, BOW, numerics=False)
        assert 0.97 < profile.cycles / plan.cycles < 1.08, (n, plan)
        needed = plan.temporary_bytes + plan.resident_bytes
        if needed > 10_000:  # Of tiny products, padding is most.
            assert 0.5 < profile.memory.data_bytes.max() / needed < 1.25, (n, plan)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_estimate_and_run_of_padded_products(dtype):
    """Sizes that are no multiples of the vertex's groups are padded. The planner counts that in
    every serial step, the program does it once, in extra supersteps that dominate tiny products."""
    for tiles in (16, 200, 1472):
        for sizes in ((653, 340, 328), (74, 458, 38), (519, 61, 30), (1383, 183, 117)):
            target = Target.bow(tiles=tiles)
            plan = dense.plan(*sizes, dtype, target)
            *_, profile = run(plan, target, numerics=False)
            assert 0.8 < profile.cycles / plan.cycles < 1.65, (sizes, plan)
