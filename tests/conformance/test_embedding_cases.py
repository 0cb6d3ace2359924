"""Family N of PopSparse's cases: embeddings tied to a matmul, gathered and updated (120)."""

import itertools

import numpy as np
import pytest

from popsparse.embedding import (
    create_indices_tensor,
    create_slice_tensor,
    embedding_slice,
    embedding_update_add,
)
from popsparse.encoding.partitioner import Partitioner
from popsparse.formats import COOMatrix
from popsparse.machine import Engine, Graph, Sequence, Target
from popsparse.planning.params import FullyConnectedParams, SparsityParams
from popsparse.products import (
    create_fully_connected_input,
    create_fully_connected_weights,
    fully_connected_forward,
)

TYPES = ("float16", "float32")
CASES = {
    f"element-{dtype}-{rows}x{cols}-indices{count}": (dtype, rows, cols, (1, 1), count)
    for dtype, rows, cols, count in itertools.product(
        TYPES, (4, 67, 126), (8, 65), (1, 2, 4, 5, 16, 17)
    )
} | {
    f"block-{dtype}-{rows}x{cols}-{block[0]}x{block[1]}-indices{count}": (
        dtype, rows, cols, block, count,
    )
    for dtype, rows, cols, block, count in itertools.product(
        TYPES, (24, 120), (8, 24), ((4, 2), (8, 4)), (1, 2, 17)
    )
}  # fmt: skip
assert len(CASES) == 120


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_case(case):
    dtype, rows, cols, block, count = case
    element = block == (1, 1)
    density, oversize, tiles = (0.2, 0.5, 16) if element else (0.1, 0.6, 32)
    options = {"do_grad_w_pass": True, "meta_info_bucket_oversize_proportion": oversize}
    params = FullyConnectedParams.create_with_nz_ratio(
        SparsityParams(block), density, 4, 1, cols, rows
    )
    graph = Graph(Target.mk2(tiles=tiles))
    weights = create_fully_connected_weights(graph, dtype, params, options)
    indices = create_indices_tensor(graph, params, count)
    update = create_slice_tensor(graph, dtype, params, count, options)
    programs = {name: Sequence() for name in ("slice", "update", "forward")}
    found = embedding_slice(graph, weights, indices, programs["slice"], params, options)
    embedding_update_add(graph, weights, update, indices, 0.5, programs["update"], params, options)
    tensors = {"words": weights.meta_info, "values": weights.nz_values, "indices": indices,
               "update": update, "slices": found}  # fmt: skip
    if element:  # Tied: the same weights multiply.
        tensors["x"] = create_fully_connected_input(graph, dtype, params, options)
        tensors["y"] = fully_connected_forward(
            graph, weights, tensors["x"], params, programs["forward"], options
        )
    for name, tensor in tensors.items():
        graph.add_handle(name, tensor)
    engine = Engine(graph, programs)

    rng = np.random.default_rng(0)
    kind = np.dtype(dtype)
    grid = (rows // block[0], cols // block[1])
    chosen = rng.permutation(grid[0] * grid[1])[: max(1, int(density * grid[0] * grid[1]))]
    at_row, at_col = np.divmod(chosen, grid[1])
    data = rng.integers(-4, 5, (len(chosen), *block)).astype(kind)
    matrix = COOMatrix(data.reshape(-1), at_col * block[1], at_row * block[0], (rows, cols), block)
    dense, present = np.zeros((rows, cols)), np.zeros((rows, cols), bool)
    for r, c, values in zip(at_row, at_col, data, strict=True):
        here = np.s_[r * block[0] : (r + 1) * block[0], c * block[1] : (c + 1) * block[1]]
        dense[here], present[here] = values, True

    encoded = Partitioner(weights.plan).encode(matrix)
    wanted_rows = rng.integers(0, rows, count)
    slices = rng.integers(-4, 5, (count, cols)).astype(kind)
    engine.write("words", encoded.meta_info)
    engine.write("values", encoded.nz_values)
    engine.write("indices", wanted_rows)
    engine.write("update", slices)
    engine.run("slice")
    np.testing.assert_array_equal(engine.read("slices"), dense[wanted_rows])
    engine.run("update")
    np.add.at(dense, wanted_rows, 0.5 * slices.astype(float))
    dense[~present] = 0
    engine.run("slice")
    np.testing.assert_array_equal(engine.read("slices"), dense[wanted_rows])
    if element:
        x = rng.integers(-2, 3, (4, cols)).astype(kind)
        engine.write("x", x)
        engine.run("forward")
        np.testing.assert_allclose(engine.read("y"), x.astype(float) @ dense.T, rtol=1e-3)
