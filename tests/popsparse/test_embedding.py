"""Embeddings on the machine: spilled buckets, scale as a tensor, cycles, bad input."""

import numpy as np
import pytest
import torch

from dynsparse.pattern import SparsePattern
from popsparse.embedding import (
    EmbeddingLayer,
    create_indices_tensor,
    create_slice_tensor,
    embedding_slice,
    embedding_update_add,
)
from popsparse.encoding.partitioner import Partitioner
from popsparse.machine import Engine, Graph, Sequence, Target
from popsparse.planning.params import FullyConnectedParams, SparsityParams
from popsparse.planning.plan import PASSES
from popsparse.planning.search import plan
from popsparse.products import create_fully_connected_weights


@pytest.mark.sampled(4)
@pytest.mark.parametrize("scale_type", [None, "half", "float"])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("partition", [(4, 3, 1), (2, 4, 2), (1, 4, 3), (3, 1, 2), (1, 1, 1)])
def test_spilled_buckets(partition, block, scale_type):
    rows, cols, count = 64, 48, 11
    options = {
        "do_grad_w_pass": True,
        "force_bucket_spills": partition[0] * partition[1] > 1,
        "plan_constraints": {"partition": dict(zip("xyz", partition, strict=True))},
    }
    params = FullyConnectedParams.create_with_nz_ratio(
        SparsityParams(block), 0.3, 12, 1, cols, rows
    )
    graph = Graph(Target.mk2(tiles=17))
    weights = create_fully_connected_weights(graph, "float32", params, options)
    indices = create_indices_tensor(graph, params, count)
    plain = graph.add_variable("float", [count, cols], "update", tiles=1)
    scale = -2.0 if scale_type is None else graph.add_variable(scale_type, [], "scale", tiles=0)
    programs = {"slice": Sequence(), "update": Sequence()}
    out = embedding_slice(graph, weights, indices, programs["slice"], params, options)
    embedding_update_add(graph, weights, plain, indices, scale, programs["update"], params, options)
    handles = {"words": weights.meta_info, "values": weights.nz_values, "i": indices,
               "update": plain, "out": out}  # fmt: skip
    if scale_type is not None:
        handles["scale"] = scale
    for name, tensor in handles.items():
        graph.add_handle(name, tensor)
    engine = Engine(graph, programs)
    generator = torch.Generator().manual_seed(0)
    pattern = SparsePattern.random((rows, cols), 0.3, block_size=block, generator=generator)
    if partition[2] > 1:  # Spills would find room with the Z partners.
        corner = torch.zeros(rows, cols, dtype=torch.bool)
        corner[: rows // partition[0] // 4 * 4, : cols // partition[1]] = True
        if partition[1] > 1:
            pattern = SparsePattern.from_mask(corner, block)
    values = torch.randint(-4, 5, pattern.values_shape, generator=generator).float()
    encoded = Partitioner(weights.plan).encode(pattern, values)
    if partition[1] > 1:
        assert encoded.info.propagated
    chosen = torch.randint(rows, (count,), generator=generator)
    update = torch.randint(-4, 5, (count, cols), generator=generator).float()
    for name, data in (("words", encoded.meta_info), ("values", encoded.nz_values),
                       ("i", chosen), ("update", update)):  # fmt: skip
        engine.write(name, data)
    if scale_type is not None:
        engine.write("scale", -2.0)
    dense = pattern.to_dense(values)
    assert engine.run("slice").cycles > 0
    np.testing.assert_array_equal(engine.read("out"), dense[chosen])
    engine.run("update")
    dense.index_add_(0, chosen, -2.0 * update)
    wanted = dense * pattern.to_mask()
    engine.run("slice")
    np.testing.assert_array_equal(engine.read("out"), wanted[chosen])
    found = encoded.pattern.gather(engine.read("values"))
    np.testing.assert_array_equal(found, pattern.values_of(wanted))


def test_a_table_without_values():
    pattern = SparsePattern([], [], shape=(12, 8))
    planned = plan(12, 8, 3, 0.0, dtype="float32", target=Target(tiles=2), passes=PASSES)
    table = EmbeddingLayer(planned, 3)
    table.set_weights(pattern, np.zeros(0, np.float32))
    assert not table.slice([0, 5, 11]).any()
    assert table.gradient([0, 5, 11], np.ones((3, 8), np.float32)).shape == (0,)


def test_index_out_of_range_gives_zeros():
    params = FullyConnectedParams.create_with_nz_ratio(SparsityParams(1), 1.0, 4, 1, 8, 6)
    options = {"meta_info_bucket_oversize_proportion": 1.0}
    graph, program = Graph(Target.mk2(tiles=4)), Sequence()
    weights = create_fully_connected_weights(graph, "float32", params, options)
    indices = create_indices_tensor(graph, params, 3)
    out = embedding_slice(graph, weights, indices, program, params, options)
    for name, t in {"w": weights.meta_info, "v": weights.nz_values, "i": indices, "o": out}.items():
        graph.add_handle(name, t)
    engine = Engine(graph, program)
    pattern = SparsePattern.full((6, 8))
    encoded = Partitioner(weights.plan).encode(pattern, torch.ones(48))
    engine.write("w", encoded.meta_info)
    engine.write("v", encoded.nz_values)
    engine.write("i", [5, 6, 4_000_000_000])
    engine.run()
    np.testing.assert_array_equal(engine.read("o").sum(1), [8, 0, 0])


def test_bad_input():
    params = FullyConnectedParams.create_with_nz_ratio(SparsityParams(1), 0.3, 4, 1, 8, 6)
    graph, program = Graph(Target.mk2(tiles=4)), Sequence()
    weights = create_fully_connected_weights(graph, "float32", params)
    indices = create_indices_tensor(graph, params, 3)
    slices = create_slice_tensor(graph, "float32", params, 3)
    with pytest.raises(ValueError, match="indices must be uint32"):
        embedding_slice(graph, weights, slices, program, params)
    with pytest.raises(ValueError, match="num_indices must be an integer of at least 1"):
        create_indices_tensor(graph, params, 0)
    two = FullyConnectedParams.create_with_nz_ratio(SparsityParams(1), 0.3, 4, 2, 8, 6)
    with pytest.raises(ValueError, match="an embedding has one group"):
        create_indices_tensor(graph, two, 3)
    options = {"do_grad_w_pass": True}
    trained = create_fully_connected_weights(graph, "float32", params, options)
    wrong = create_slice_tensor(graph, "float32", params, 2, options)
    with pytest.raises(ValueError, match=r"slices must be float32 \[3, 8\]"):
        embedding_update_add(graph, trained, wrong, indices, 1.0, program, params, options)
    with pytest.raises(ValueError, match="scale must be a number or one float16 or float32"):
        embedding_update_add(graph, trained, slices, indices, slices, program, params, options)
