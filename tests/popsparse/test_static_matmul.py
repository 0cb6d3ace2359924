"""Static products on the machine equal dense products in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynsparse.pattern import SparsePattern
from popsparse import static
from popsparse.formats import CSRMatrix
from popsparse.machine import Engine, Graph, Sequence, Target

TOLERANCE = {"float16": 0.1, "float32": 0.01}  # Section 8.1 of docs/popsparse-formulas.md.


def random_matrix(rows, columns, block, density, seed, dtype="float32"):
    """Make a matrix of integers, so that float16 sums of a few of them are exact."""
    pattern = SparsePattern.random(
        (rows, columns),
        density=density,
        block_size=block,
        generator=torch.Generator().manual_seed(seed),
    )
    rng = np.random.default_rng(seed)
    values = rng.integers(-2, 3, pattern.values_shape).astype(dtype)
    return CSRMatrix.from_pattern(pattern, values)


def run(matrix, n, dtype, target, *, dense_sparse=False, options=None, foreign=False, operand=None):
    """Run the product on the machine; return (result, exact result, profile, plan)."""
    a, b = matrix.shape
    if dense_sparse:
        params = static.MatmulParams.create_for_dense_sparse(1, n, a, b)
        make_sparse, make_dense = (
            static.create_dense_sparse_matmul_rhs,
            static.create_dense_sparse_matmul_lhs,
        )
        shape = [1, n, a]
    else:
        params = static.MatmulParams.create_for_sparse_dense(1, a, b, n)
        make_sparse, make_dense = (
            static.create_sparse_dense_matmul_lhs,
            static.create_sparse_dense_matmul_rhs,
        )
        shape = [1, b, n]
    graph, program = Graph(target), Sequence()
    cache = static.PlanningCache()
    sparse = make_sparse(graph, dtype, params, matrix, options, cache)
    if foreign:
        dense = graph.add_variable(sparse.nz_values.dtype, shape, "dense")
        graph.map_linearly(dense)
    else:
        dense = make_dense(graph, dtype, params, matrix, options, cache)
        assert cache.hits == 1
    if dense_sparse:
        out = static.dense_sparse_matmul(graph, dense, sparse, program)
    else:
        out = static.sparse_dense_matmul(graph, sparse, dense, program)
    if operand is None:
        operand = np.random.default_rng(0).integers(-2, 3, shape).astype(dtype)
    partitioner = static.Partitioner(params, dtype, target, matrix, options, cache)
    graph.add_handle("out", out)
    engine = Engine(graph, program)
    engine.write(sparse.nz_values, partitioner.encode(matrix).astype(dtype))
    engine.write(dense, operand)
    profile = engine.run()
    exact = matrix.to_dense().astype(np.float64)
    exact = operand[0] @ exact if dense_sparse else exact @ operand[0].astype(np.float64)
    return engine.read("out")[0], exact, profile, sparse.plan


# Family M (section 8.2 of docs/popsparse-formulas.md): 4 tiles, types and blocks, all plans free.
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("block", [1, 4, 8, 16])
@pytest.mark.parametrize(
    ("rows", "columns", "n", "density"),
    [("b", "b", 1, 1.0), (64, 64, 32, 1.0), (512, 64, 8, 0.01), (512, 64, 13, 0.1)],
)
def test_family_m(dtype, block, rows, columns, n, density):
    rows, columns = (block if size == "b" else size for size in (rows, columns))
    matrix = random_matrix(rows, columns, block, density, 3)
    found, exact, *_ = run(matrix, n, dtype, Target(tiles=4))
    np.testing.assert_allclose(found, exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("density", [0.1, 0.0001])
def test_family_m_low_memory(density):
    matrix = random_matrix(512, 8, 4, density, 5)
    options = {"available_memory_proportion": 0.45}
    found, exact, *_ = run(matrix, 7, "float16", Target(tiles=4), options=options)
    np.testing.assert_allclose(found, exact, rtol=0.1, atol=0.1)


def test_family_m_dense_sparse_on_one_tile():
    matrix = random_matrix(129, 52, 1, 0.3, 7)
    found, exact, *_ = run(matrix, 1, "float32", Target(tiles=1), dense_sparse=True)
    assert found.shape == (1, 52)
    np.testing.assert_allclose(found, exact, rtol=0.01, atol=0.01)


@settings(deadline=None, max_examples=25)
@given(
    dtype=st.sampled_from(["float16", "float32"]),
    block=st.sampled_from([1, 4, 8, 16]),
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    n=st.integers(1, 30),
    density=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    tiles=st.sampled_from([1, 2, 3, 6, 16]),
    num_bands=st.integers(0, 2),
    n_split=st.integers(0, 2),
    dense_sparse=st.booleans(),
    foreign=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_product(
    dtype, block, rows, columns, n, density, tiles, num_bands, n_split, dense_sparse, foreign, seed
):
    width = 4 if dtype == "float16" else 2
    grains = tiles // 2 if tiles % 2 == 0 else tiles
    n_split = min(n_split, -(-n // width), grains)
    num_bands = min(num_bands, max(1, grains // max(n_split, 1)), rows, columns)
    matrix = random_matrix(rows * block, columns * block, block, density, seed)
    options = {"num_bands": num_bands, "n_split": n_split}
    target = Target(tiles=tiles)
    found, exact, *_ = run(
        matrix, n, dtype, target, dense_sparse=dense_sparse, options=options, foreign=foreign
    )
    np.testing.assert_allclose(found, exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("block", [1, 8])
def test_execution_model_equals_the_machine(dtype, block):
    """Compute cycles are equal; exchange differs by data that is already on its tile."""
    matrix = random_matrix(256, 256, block, 0.1, 11)
    *_, profile, plan = run(matrix, 64, dtype, Target.mk2(tiles=24))
    time = static.predict(plan)
    steps = {step.name: step for step in time.steps}
    assert profile.step("multiply").compute == steps["multiply"].compute
    assert profile.step("reduce").compute == steps["reduce"].compute
    for name in ("gather operands", "exchange partials"):
        assert profile.step(name).exchange == pytest.approx(steps[name].exchange, rel=0.15)
    assert profile.cycles == pytest.approx(time.cycles, rel=0.15)


def test_float16_blocks_round_after_each_block():
    """2048 + 1 + 1 rounds to 2048 twice in float16; in float32 it would be 2050."""
    pattern = SparsePattern([0, 0, 0], [0, 1, 2], shape=(4, 12), block_size=4)
    values = np.zeros((3, 4, 4), np.float16)
    values[0], values[1], values[2] = 512, 0.25, 0.25
    matrix, ones = CSRMatrix.from_pattern(pattern, values), np.ones((1, 12, 1), np.float16)
    for dtype, largest in (("float16", 2048), ("float32", 2050)):
        found, *_ = run(matrix, 1, dtype, Target(tiles=1), operand=ones.astype(dtype))
        assert found.max() == largest


@pytest.mark.parametrize("block", [1, 4])
def test_slots_of_the_pattern_may_have_any_order(block):
    """As after updates, which give dropped slots to grown blocks."""
    pattern, values = random_matrix(32, 24, block, 0.3, 0).to_pattern()
    order = torch.arange(pattern.nnz).flip(0)
    updated = SparsePattern._from_slot_coordinates(
        pattern.rows[order], pattern.cols[order], shape=(32, 24), block_size=block
    )
    params = static.MatmulParams.create_for_sparse_dense(1, 32, 24, 8)
    found, expected = (
        static.Partitioner(params, "float32", Target(tiles=4), one).encode(one, of_slots)
        for one, of_slots in ((updated, values[order]), (pattern, values))
    )
    np.testing.assert_array_equal(found, expected)


def test_round_trip_of_dense_sparse():
    matrix = random_matrix(32, 48, 4, 0.3, 2)
    params = static.MatmulParams.create_for_dense_sparse(1, 8, 32, 48)
    partitioner = static.Partitioner(params, "float32", Target(tiles=4), matrix)
    assert partitioner.decode(partitioner.encode(matrix)) == matrix


# Family L (section 8.2 of docs/popsparse-formulas.md).
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("form", ["csr", "coo", "csc"])
@pytest.mark.parametrize("block", [1, 4, 8, 16])
@pytest.mark.parametrize(("rows", "columns", "density"), [(128, 112, 0.5), (32, 512, 0.1)])
def test_family_l_round_trip(dtype, form, block, rows, columns, density):
    matrix = random_matrix(rows, columns, block, density, 1, dtype)
    given_form = getattr(matrix, f"to_{form}")()
    params = static.MatmulParams.create_for_sparse_dense(1, rows, columns, 8)
    partitioner = static.Partitioner(params, dtype, Target(tiles=4), given_form)
    found = partitioner.decode(partitioner.encode(given_form))
    assert found == matrix
    assert found.nz_values.dtype == np.dtype(dtype)
