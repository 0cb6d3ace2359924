"""Tensor operations on the tile machine equal NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from popsparse.machine import FLOAT, HALF, INT, Engine, Graph, MappingError, Sequence, Target
from popsparse.tensor_ops import OPERATIONS, elementwise, matmul, reduce, softmax

TARGET = Target.mk2(tiles=6)
NUMPY = {
    "relu": lambda a: np.maximum(a, 0),
    "sigmoid": lambda a: 1 / (1 + np.exp(-a)),
    "scaled add": lambda a, b, c: a + c * b,
    "copy": lambda a: a,
}
DTYPES = {"half": (HALF, np.float16, 2e-3), "float": (FLOAT, np.float32, 1e-6)}


def variable(graph, shape, seed, dtype=FLOAT):
    """Make a variable with elements on random tiles."""
    tiles = np.random.default_rng(seed).integers(graph.target.tiles, size=shape)
    return graph.add_variable(dtype, list(shape), f"x{seed}", tiles=tiles)


def numbers(shape, seed=0):
    return np.random.default_rng(seed).uniform(0.5, 2, size=shape)


def ran(graph, program, **values):
    engine = Engine(graph, program)
    for name, one in values.items():
        engine.write(name, one)
    return engine, engine.run()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_elementwise_operations(operation, dtype):
    kind, kept, near = DTYPES[dtype]
    graph, program = Graph(TARGET), Sequence()
    count = OPERATIONS[operation].operands
    names = [f"x{seed}" for seed in range(min(count, 2))]
    shapes = [(5, 7), (7,)][: len(names)]
    operands = [variable(graph, shape, seed, kind) for seed, shape in enumerate(shapes)]
    given_ = {name: numbers(shape, i).astype(kept) for i, (name, shape) in
              enumerate(zip(names, shapes, strict=True))}  # fmt: skip
    more = [0.25] if count == 3 else []
    out = elementwise(graph, operation, [*operands, *more], program)
    assert (out.shape, out.dtype) == ((5, 7), kind)
    np.testing.assert_array_equal(graph.tiles_of(out), graph.tiles_of(operands[0]))
    engine, profile = ran(graph, program, **given_)
    exact = NUMPY.get(operation) or getattr(np, operation)
    wanted = exact(*(one.astype(np.float64) for one in given_.values()), *more)
    np.testing.assert_allclose(engine.read(out), wanted, rtol=near, atol=near)
    assert profile.step(operation).compute > 0


def test_scalars_and_in_place_results():
    graph, program = Graph(TARGET), Sequence()
    x = graph.add_variable(FLOAT, [4, 3], "x", tiles=[0, 1, 2, 3])
    half = graph.add_variable(HALF, [4, 3], "half", tiles=[3, 2, 1, 0])
    elementwise(graph, "multiply", [x, 3], program, out=x)
    elementwise(graph, "copy", [x], program, out=half)
    engine, profile = ran(graph, program, x=np.arange(12).reshape(4, 3))
    np.testing.assert_array_equal(engine.read("x"), 3 * np.arange(12).reshape(4, 3))
    np.testing.assert_array_equal(engine.read("half"), engine.read("x"))
    # 3 elements, one for each of 3 workers: a vector each; 58 + 2 + 3, six apart.
    assert profile.step("multiply").compute == 6 * 63
    assert profile.step("copy: bring").received_bytes.sum() == 12 * 4


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.data(),
)
def test_reductions(shape, data):
    axes = data.draw(
        st.lists(
            st.integers(-len(shape), len(shape) - 1), min_size=1, unique_by=lambda a: a % len(shape)
        )
    )
    graph, program = Graph(TARGET), Sequence()
    x = variable(graph, shape, 3)
    found = {kind: reduce(graph, x, axes, program, operation=kind) for kind in ("add", "max")}
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    engine, _ = ran(graph, program, x3=values)
    np.testing.assert_allclose(
        engine.read(found["add"]), values.sum(tuple(axes)), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(engine.read(found["max"]), values.max(tuple(axes)))


def test_exchange_of_a_reduction():
    graph, program = Graph(TARGET), Sequence()
    x = graph.add_variable(HALF, [6, 12], "x", tiles=np.arange(6))
    out = reduce(graph, x, 0, program)
    engine, profile = ran(graph, program, x=1)
    assert engine.read(out).tolist() == [6] * 12
    assert graph.tiles_of(out).tolist() == [i // 2 for i in range(12)]
    # Every tile gets the other five's float32 partials of its two outputs.
    assert profile.step("reduce add: exchange").received_bytes.tolist() == [5 * 2 * 4] * 6


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_and_softmax(dtype):
    kind, kept, near = DTYPES[dtype]
    graph, program = Graph(TARGET), Sequence()
    a, b = variable(graph, (9, 20), 0, kind), variable(graph, (20, 5), 1, kind)
    product = matmul(graph, a, b, program)
    shares = softmax(graph, product, program)
    given_ = {"x0": numbers((9, 20)).astype(kept), "x1": numbers((20, 5), 1).astype(kept)}
    engine, profile = ran(graph, program, **given_)
    wanted = given_["x0"].astype(float) @ given_["x1"].astype(float)
    np.testing.assert_allclose(engine.read(product), wanted, rtol=5 * near)
    powers = np.exp(wanted - wanted.max(1, keepdims=True))
    wanted = powers / powers.sum(1, keepdims=True)
    np.testing.assert_allclose(engine.read(shares), wanted, atol=20 * near)
    np.testing.assert_allclose(engine.read(shares).sum(1, dtype=float), 1, atol=5 * near)
    assert profile.step("softmax/exp").compute > 0
    assert profile.step("matmul/dense product").compute > 0


def test_bad_input():
    graph, program = Graph(TARGET), Sequence()
    x, y = variable(graph, (4, 3), 0), variable(graph, (4, 3), 1, HALF)
    whole = graph.add_variable(INT, [4], "whole", tiles=0)
    bare = graph.add_variable(FLOAT, [4], "bare")
    for make, line in (
        (lambda: elementwise(graph, "plus", [x, x], program), "operation must be one of add"),
        (lambda: elementwise(graph, "add", [x], program), "takes 2 operands, got 1"),
        (lambda: elementwise(graph, "add", [1, 2], program), "only numbers"),
        (lambda: elementwise(graph, "add", [x[0], x], program), "broadcast"),
        (lambda: elementwise(graph, "exp", [bare], program), "without a tile"),
        (lambda: reduce(graph, x, 2, program), "axis must be dimensions"),
        (lambda: reduce(graph, x, [0, -2], program), "names a dimension twice"),
        (lambda: reduce(graph, x, 0, program, operation="mean"), "operation must be one of add"),
        (lambda: matmul(graph, x, x, program), r"expected a \[m, k\] and b \[k, n\]"),
    ):
        with pytest.raises((ValueError, MappingError), match=line):
            make()
    for make, line in (
        (lambda: elementwise(graph, "add", [x, "1"], program), "tensors or numbers"),
        (lambda: elementwise(graph, "exp", [whole], program), "float16 or float32, got int32"),
        (lambda: matmul(graph, x, y.transpose(), program), "both be float16 or both float32"),
    ):
        with pytest.raises(TypeError, match=line):
            make()
