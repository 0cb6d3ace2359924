"""Block-sparse products and softmax on the tile machine, beyond the published cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynsparse import SparsePattern
from dynsparse.ops import block_sparse as on_the_cpu
from popsparse import block_sparse
from popsparse.machine import FLOAT, Engine, Graph, Sequence, Target
from popsparse.planning.options import PARTITION_METHODS

Params = block_sparse.MatmulParams


def run(params, tiles=5, options=None, seed=0, spread=False):
    """Return (left operand, right operand, result, profile); `spread` maps operands randomly."""
    graph, program = Graph(Target.mk2(tiles=tiles)), Sequence()
    lhs = block_sparse.create_matmul_lhs(graph, params, options)
    rhs = block_sparse.create_matmul_rhs(graph, params, options)
    if spread:
        for which in ("lhs", "rhs"):
            own = lhs if which == "lhs" else rhs
            other = graph.add_variable(own.dtype, [*own.shape], f"{which} anywhere")
            graph.map_linearly(other)
            lhs, rhs = (other, rhs) if which == "lhs" else (lhs, other)
    out = block_sparse.matmul(graph, params, program, lhs, rhs, options)
    rng, found = np.random.default_rng(seed), []
    for name, tensor in (("lhs", lhs), ("rhs", rhs), ("out", out)):
        graph.add_handle(name, tensor)
    engine = Engine(graph, program)
    for name, tensor in (("lhs", lhs), ("rhs", rhs)):
        found.append(rng.uniform(-1, 1, tensor.shape).astype(params.dtype.name))
        engine.write(name, found[-1])
    profile = engine.run()
    return *found, engine.read("out").astype(np.float64), profile


def laid_out(blocks, mask, height, width):
    groups, rows, cols = mask.shape
    found = np.zeros((groups, rows, cols, height, width))
    found[mask] = blocks.reshape(-1, height, width)
    return found.transpose(0, 1, 3, 2, 4).reshape(groups, rows * height, cols * width)


def wanted(params, left, right):
    """In float64."""
    groups, (m, k, n), (bm, bk, bn) = params.groups, params.dim, params.block_size
    left, right = left.astype(np.float64), right.astype(np.float64)
    if params.kind == "dense_dense":
        full = left.reshape(groups, m, k) @ right.reshape(groups, k, n)
        row, col = np.arange(m)[:, None], np.arange(n)
        if params.subblock_mask == "zero_upper_triangle":
            full = full * (col <= row)
        elif params.subblock_mask == "zero_lower_triangle":
            full = full * (col >= row)
        grid = full.reshape(groups, m // bm, bm, n // bn, bn).transpose(0, 1, 3, 2, 4)
        return grid[params.mask].reshape(-1, bm * bn)
    sparse = laid_out(right, params.mask, *((bn, bk) if params.transposed else (bk, bn)))
    sparse = sparse.transpose(0, 2, 1) if params.transposed else sparse
    return (left.reshape(groups, m, k) @ sparse).reshape(groups * m, n)


@st.composite
def products(draw):
    kind = draw(st.sampled_from(["dense_sparse", "dense_dense"]))
    grid = [draw(st.integers(1, 4)) for _ in range(3)]
    blocks = [draw(st.sampled_from([2, 4, 6])) for _ in range(3)]
    groups, turned = draw(st.sampled_from([1, 1, 2])), draw(st.booleans())
    rows, cols = grid[1 if kind == "dense_sparse" else 0], grid[2]
    if turned and kind != "dense_dense":
        rows, cols = cols, rows
    size = groups * rows * cols
    mask = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    dim = [g * b for g, b in zip(grid, blocks, strict=True)]
    dtype = draw(st.sampled_from(["float16", "float32"]))
    if kind == "dense_dense":
        sub = draw(st.sampled_from(["none", "zero_upper_triangle", "zero_lower_triangle"]))
        return Params.create_dense_dense(
            dim, blocks, mask, dtype=dtype, subblock_mask=sub, num_groups=groups
        )
    return Params.create_dense_sparse(dim, blocks, mask, turned, dtype=dtype, num_groups=groups)


@settings(max_examples=60, deadline=None)
@given(products(), st.sampled_from(PARTITION_METHODS), st.integers(1, 9), st.booleans())
def test_products_equal_float64(params, method, tiles, spread):
    left, right, found, profile = run(params, tiles, {"partition_method": method}, spread=spread)
    tolerance = {"float16": 0.02, "float32": 1e-5}[params.dtype.name]
    np.testing.assert_allclose(found, wanted(params, left, right), rtol=tolerance, atol=tolerance)
    assert profile.cycles > 0 or not params.nnz


@pytest.mark.parametrize("method", ["strip", "stripv0"])
@pytest.mark.parametrize("kind", ["dense_sparse", "dense_dense"])
def test_several_passes_use_less_memory_and_equal_float64(method, kind):
    mask = np.random.default_rng(0).random((8, 8)) < 0.4
    make = getattr(Params, f"create_{kind}")
    params = make((64, 64, 64), (8, 8, 8), mask, dtype="float32")
    cycles, memory = [], []
    for passes in (1, 4):
        options = {"partition_method": method, "number_of_pass": passes}
        left, right, found, profile = run(params, 8, options)
        np.testing.assert_allclose(found, wanted(params, left, right), rtol=1e-5, atol=1e-5)
        cycles.append(profile.cycles)
        memory.append(profile.memory.max_tile_bytes)
    assert cycles[1] > cycles[0]
    assert memory[1] < memory[0]


def test_float16_partials_and_another_result_type():
    mask = np.ones((2, 2), bool)
    params = Params.create_dense_sparse(
        (32, 32, 32), (16, 16, 16), mask, partials_type="float16", out_dtype="float32"
    )
    left, right, found, _ = run(params)
    np.testing.assert_allclose(found, wanted(params, left, right), rtol=0.02, atol=0.02)


def test_cycles_are_proportional_to_the_blocks():
    cycles = []
    for blocks in (1, 2, 4, 8):
        mask = np.zeros((8, 8), bool)
        mask[:, :blocks] = True
        params = Params.create_dense_sparse((64, 256, 256), (32, 32, 32), mask)
        *_, profile = run(params, 1)
        cycles.append(profile.cycles)
    steps = np.diff(cycles)
    assert 1.8 < steps[1] / steps[0] < 2.2  # 2 more columns of blocks, after one more
    assert 1.8 < steps[2] / steps[1] < 2.2


def test_plans_describe_partitions():
    rng = np.random.default_rng(0)
    params = Params.create_dense_sparse((64, 256, 256), (16, 16, 16), rng.random((16, 16)) < 0.2)
    target = Target.mk2(tiles=16)
    plans = {
        m: block_sparse.plan(params, target, {"partition_method": m}) for m in PARTITION_METHODS
    }
    for method, plan in plans.items():
        pieces = plan.pieces
        assert sorted(pieces.chosen) == list(range(params.nnz * params.grid[0])), method
        assert plan.imbalance >= 1
        assert method in repr(plan)
    assert plans["block-naive"].imbalance <= plans["stripv0"].imbalance
    # A tile that minds its memory holds fewer blocks, at a worse balance.
    held = []
    for ratio in (0.0, 0.9):
        plan = block_sparse.plan(
            params, target, {"partition_method": "block", "memory_cycle_ratio": ratio}
        )
        pieces = plan.pieces
        tiles = np.repeat(pieces.tile, np.diff(pieces.first))
        held.append(len({*zip(tiles.tolist(), pieces.products.b[pieces.chosen], strict=True)}))
    assert held[1] < held[0]


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.9])
def test_result_blocks_are_placed_at_minimum_cost(ratio):
    mask = np.random.default_rng(3).random((9, 7)) < 0.4
    params = Params.create_dense_sparse((20, 36, 28), (4, 4, 4), mask)
    target = Target.mk2(tiles=6)
    options = {"partition_method": "block", "memory_cycle_ratio": ratio}
    pieces = block_sparse.plan(params, target, options).pieces
    first, a, b = pieces.products.first, pieces.products.a, pieces.products.b
    held, loads, tile = [set() for _ in range(6)], [0] * 6, {}
    blocks = len(np.unique(a)) + len(np.unique(b))
    for result in np.argsort(-np.diff(first), kind="stable"):
        some = range(first[result], first[result + 1])
        need = {("a", a[i]) for i in some} | {("b", b[i]) for i in some}
        cost = [
            (1 - ratio) * (loads[t] + len(some)) / first[-1]
            + ratio * (len(held[t]) + len(need - held[t])) / blocks
            for t in range(6)
        ]
        if need:
            tile[result] = cost.index(min(cost))
            held[tile[result]] |= need
            loads[tile[result]] += len(some)
    assert dict(zip(pieces.result.tolist(), pieces.tile.tolist(), strict=True)) == tile


def softmax_run(values, mask, block, dtype, sub, groups=1, in_place=False, grad=None, tiles=5):
    rows, cols = mask.shape[0] * mask.shape[1] * block, mask.shape[2] * block
    graph, program = Graph(Target.mk2(tiles=tiles)), Sequence()
    tensor = graph.add_variable(dtype, [*values.shape], "values")
    graph.map_linearly(tensor)
    told = ((rows, cols), (block, block), mask.reshape(-1))
    out = tensor
    if in_place:
        block_sparse.softmax_in_place(graph, tensor, *told, program, sub, groups)
    else:
        out = block_sparse.softmax(graph, tensor, *told, program, sub, groups)
    handles = {"values": tensor, "out": out}
    if grad is not None:
        other = graph.add_variable(dtype, [*values.shape], "gradient")
        graph.set_tile_mapping(other, tiles - 1)
        handles |= {"grad": other}
        handles["in"] = block_sparse.softmax_grad(graph, out, other, *told, program)
    for name, one in handles.items():
        graph.add_handle(name, one)
    engine = Engine(graph, program)
    engine.write("values", values)
    if grad is not None:
        engine.write("grad", grad)
    profile = engine.run()
    assert profile.cycles >= 0
    return [engine.read(name) for name in ("out", "in") if name in handles]


@settings(max_examples=40, deadline=None)
@given(
    st.data(),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(["none", "zero_upper_triangle", "zero_lower_triangle"]),
    st.sampled_from(["float16", "float32"]),
    st.booleans(),
)
def test_softmax_equals_the_cpu(data, groups, sub, dtype, in_place):
    block = data.draw(st.sampled_from([1, 2, 4]))
    rows, cols = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    size = groups * rows * cols
    drawn = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    mask = np.array(drawn).reshape(groups, rows, cols)
    rng = np.random.default_rng(0)
    values = (3 * rng.standard_normal((mask.sum(), block * block))).astype(dtype)
    grad = rng.standard_normal(values.shape).astype(dtype)
    found = softmax_run(values, mask, block, dtype, sub, groups, in_place, grad)
    tolerance = {"float16": 5e-3, "float32": 1e-5}[dtype]
    counts = np.cumsum(mask.reshape(groups, -1).sum(1))[:-1]
    of_groups = zip(mask, *(np.split(x, counts) for x in (values, grad, *found)), strict=True)
    for one, given_, g, out, into in of_groups:
        row, col = np.nonzero(one)
        pattern = SparsePattern(row, col, shape=(rows * block, cols * block), block_size=block)
        x = torch.from_numpy(given_).double().reshape(pattern.values_shape).requires_grad_()
        right = on_the_cpu.softmax(x, pattern, sub)
        np.testing.assert_allclose(out, right.detach().reshape(out.shape), atol=tolerance)
        (slope,) = torch.autograd.grad(right, x, torch.from_numpy(g).double().reshape(x.shape))
        np.testing.assert_allclose(into, slope.reshape(into.shape), atol=4 * tolerance)


def _graph():
    return Graph(Target.mk2(tiles=4)), Sequence()


def _values(graph, dtype="float32", shape=(1, 16)):
    made = graph.add_variable(dtype, [*shape], "values")
    graph.map_linearly(made)
    return made


def _softmax(dim=(4, 4), block=(4, 4), sparsity=((1,),), dtype="float32", shape=(1, 16), **named):
    graph, program = _graph()
    values = _values(graph, dtype, shape)
    return block_sparse.softmax(graph, values, dim, block, sparsity, program, **named)


def _matmul(lhs=(8, 8), dtype=FLOAT):
    graph, program = _graph()
    params = Params.create_dense_sparse((8, 8, 8), (4, 4, 4), np.ones((2, 2)), dtype="float32")
    a, b = (graph.add_variable(dtype, [*s], "x", tiles=0) for s in (lhs, (4, 16)))
    return block_sparse.matmul(graph, params, program, a, b)


def _gradient(dtype, shape):
    graph, program = _graph()
    values = _values(graph)
    other = _values(graph, dtype, shape)
    return block_sparse.softmax_grad(graph, values, other, (4, 4), (4, 4), [[1]], program)


def _dense_sparse(dim=(8, 8, 8), block=(4, 4, 4), mask=((1, 1), (1, 1)), **named):
    return Params.create_dense_sparse(dim, block, mask, **named)


def _plan(params=None, **options):
    return block_sparse.plan(params or _dense_sparse(), Target.mk2(tiles=4), options)


ERRORS = {
    "81": (lambda: _dense_sparse(dtype="int32"), "float16 or float32"),
    "83": (lambda: _dense_sparse(num_groups=0), "num_groups"),
    "84": (lambda: _dense_sparse(dim=(8, 9, 8)), "k must be a multiple"),
    "85": (lambda: _dense_sparse(mask=[1] * 9, num_groups=2), "do not divide into 2 groups"),
    "86": (lambda: _dense_sparse(mask=[1] * 6), "must have 4 blocks, got 6"),
    "87": (
        lambda: _plan(_dense_sparse(mask=[1] * 8, num_groups=2), number_of_pass=2),
        "must be 1 with several groups",
    ),
    "88": (lambda: _matmul(lhs=(8, 8, 1)), r"shape \[8, 8\]"),
    "89": (lambda: _matmul(lhs=(8, 4)), r"shape \[8, 8\]"),
    "90": (lambda: _plan(number_of_pass=3), "multiple of number_of_pass"),
    "92": (lambda: _softmax(dtype="int32"), "float16 or float32"),
    "93": (lambda: _softmax(shape=(16,)), r"shape \[1, 16\]"),
    "94": (lambda: _softmax(block=(0, 4)), "block_size of rows"),
    "95": (lambda: _softmax(shape=(2, 16)), r"shape \[1, 16\]"),
    "96 type": (lambda: _gradient("float16", (1, 16)), "as out is"),
    "96 shape": (lambda: _gradient("float32", (2, 16)), "as out is"),
    "method": (lambda: _plan(partition_method="zoltan"), "partition_method must be one of"),
    "option": (lambda: _plan(memory_ratio=1), "memory_ratio"),
    "ratio": (lambda: _plan(memory_cycle_ratio=0.5), "goes with the methods block"),
    "passes": (lambda: _plan(partition_method="block", number_of_pass=2), "goes with strip"),
    "mask": (lambda: _softmax(subblock_mask="upper"), "subblock_mask must be one of"),
    "dim": (lambda: _softmax(dim=(4, 6)), "multiple of the blocks"),
    "pattern": (
        lambda: _dense_sparse(mask=SparsePattern([0], [0], shape=(4, 4), block_size=4)),
        "2 x 2 blocks, got 1 x 1",
    ),
    "type": (lambda: _matmul(dtype="float16"), "float32 as the parameters say"),
}


@pytest.mark.parametrize("number", ERRORS)
def test_wrong_arguments_raise(number):
    call, words = ERRORS[number]
    with pytest.raises((ValueError, TypeError), match=words) as told:
        call()
    assert "\n" not in str(told.value)


def test_empty_mask():
    params = Params.create_dense_dense((8, 8, 8), (4, 4, 4), np.zeros((2, 2)))
    *_, found, profile = run(params)
    assert found.shape == (0, 16)
    assert profile.cycles >= 0
    params = Params.create_dense_sparse((8, 8, 8), (4, 4, 4), np.zeros((2, 2)))
    *_, found, _ = run(params)
    assert not found.any()
    assert len([*itertools.chain(found)]) == 8
