"""The dynamic matmul as in PopSparse's tool, and the numbered errors of its API.

Sizes are those of the layer's cases; transposes as the tool's flags. The numbers of the errors are
those of section 8.3 of docs/popsparse-formulas.md.
"""

import itertools

import numpy as np
import pytest
import torch

import popsparse as ps
from dynsparse.pattern import SparsePattern
from popsparse.machine import Engine, Graph, Sequence, Target

TOLERANCE = {"float16": 0.1, "float32": 0.01}
SIZES = {
    "element": (512, 384, 4, 0.1, 1, 1),
    "block4": (256, 256, 64, 0.05, 4, 1),
    "block8": (1024, 512, 4, 0.1, 8, 1),
    "block16": (544, 512, 16, 0.1, 16, 1),
    "two-groups": (256, 192, 13, 0.1, 1, 2),
    "two-groups-block8": (256, 192, 13, 0.1, 8, 2),
}
CASES = {
    f"{size}-{dtype}-lhs{'T' * left}-rhs{'T' * right}": (size, dtype, left, right)
    for size, dtype, left, right in itertools.product(
        SIZES, ("float16", "float32"), (False, True), (False, True)
    )
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_product(case):
    size, dtype, left, right = case
    m, k, n, density, block, groups = SIZES[size]
    sparsity = ps.SparsityParams(block)
    params = ps.MatmulParams.create_with_nz_ratio(sparsity, density, groups, m, k, n)
    options = {"force_bucket_spills": True, "available_memory_proportion": 1.0}
    graph, program = Graph(Target.mk2(tiles=24)), Sequence()
    lhs = ps.create_sparse_dense_matmul_lhs(graph, dtype, params, options)
    rows = m if left else k
    if left or right:
        shape = [groups, n, rows] if right else [groups, rows, n]
        rhs = graph.add_variable(dtype, shape, "rhs")
        graph.map_linearly(rhs)
    else:
        rhs = ps.create_sparse_dense_matmul_rhs(graph, dtype, params, options)
    out = ps.sparse_dense_matmul(graph, lhs, rhs, program, left, right, options)
    handles = {"words": lhs.meta_info, "values": lhs.nz_values, "rhs": rhs, "out": out}
    for name, tensor in handles.items():
        graph.add_handle(name, tensor)
    engine = Engine(graph, program)
    generator = torch.Generator().manual_seed(0)
    patterns = [
        SparsePattern.random((m, k), density, block_size=block, generator=generator)
        for _ in range(groups)
    ]
    kind = getattr(torch, dtype)
    values = [
        (torch.randint(2, p.values_shape, generator=generator) * 2 - 1).to(kind) for p in patterns
    ]
    dense = (torch.randint(2, rhs.shape, generator=generator) * 2 - 1).to(kind)
    given = (patterns, values) if groups > 1 else (patterns[0], values[0])
    encoded = ps.Partitioner(lhs.plan).encode(*given)
    assert encoded.info.spilled
    engine.write("words", encoded.meta_info)
    engine.write("values", encoded.nz_values)
    engine.write("rhs", dense)
    engine.run()
    weights = [p.to_dense(v).double() for p, v in zip(patterns, values, strict=True)]
    stacked = torch.stack(weights)
    wanted = (stacked.mT if left else stacked) @ (dense.mT if right else dense).double()
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(engine.read("out"), wanted, rtol=tolerance, atol=tolerance)


@pytest.fixture
def made():
    """Return (graph, program, lhs, rhs, weights and parameters of the layer)."""
    graph, program = Graph(Target.mk2(tiles=4)), Sequence()
    params = ps.MatmulParams.create_with_nz_ratio(ps.SparsityParams(1), 0.2, 1, 16, 8, 4)
    lhs = ps.create_sparse_dense_matmul_lhs(graph, "float32", params)
    rhs = ps.create_sparse_dense_matmul_rhs(graph, "float32", params)
    layer = ps.FullyConnectedParams.create_with_nz_ratio(ps.SparsityParams(1), 0.2, 4, 1, 8, 16)
    weights = ps.create_fully_connected_weights(graph, "float32", layer)
    return graph, program, lhs, rhs, weights, layer


class TestErrors:
    @pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
    def test_01_ratio_outside_0_to_1(self, ratio):
        for make, sizes in (
            (ps.FullyConnectedParams.create_with_nz_ratio, (4, 1, 8, 8)),
            (ps.MatmulParams.create_with_nz_ratio, (1, 8, 8, 4)),
        ):
            with pytest.raises(ValueError, match="nz_ratio"):
                make(ps.SparsityParams(1), ratio, *sizes)

    def test_02_more_non_zeros_than_elements(self):
        for make, sizes in (
            (ps.FullyConnectedParams.create_with_num_non_zero_values, (4, 1, 8, 8)),
            (ps.MatmulParams.create_with_num_non_zero_values, (1, 8, 8, 4)),
        ):
            with pytest.raises(ValueError, match="must be at most 64, got 65"):
                make(ps.SparsityParams(1), 65, *sizes)

    @pytest.mark.parametrize(
        "options",
        [
            pytest.param({"unheard_of": 1}, id="3-name"),
            pytest.param({"partials_type": "int8"}, id="3-value"),
            pytest.param({"plan_constraints": 3}, id="4-constraints"),
            pytest.param({"plan_constraints": {"partitions": {}}}, id="5-key"),
            pytest.param({"plan_constraints": {"partition": 3}}, id="6-partition"),
            pytest.param({"plan_constraints": {"exchange": 3}}, id="6-exchange"),
            pytest.param({"plan_constraints": {"partition": {"w": 1}}}, id="7-partition"),
            pytest.param({"plan_constraints": {"exchange": {"w": 1}}}, id="7-exchange"),
            pytest.param({"plan_constraints": {"partition": {"x": True}}}, id="8-integer"),
            pytest.param({"plan_constraints": {"use_dense": 1}}, id="8-flag"),
        ],
    )
    def test_03_to_08_options(self, made, options):
        graph, _, _, _, _, layer = made
        with pytest.raises((TypeError, ValueError)) as error:
            ps.create_fully_connected_weights(graph, "float32", layer, options)
        assert "\n" not in str(error.value)

    def test_09_weights_not_a_sparse_tensor(self, made):
        graph, program, _, rhs, _, layer = made
        with pytest.raises(TypeError, match="must be a SparseTensor"):
            ps.fully_connected_forward(graph, rhs, rhs, layer, program)

    def test_10_weights_of_other_parameters_or_options(self, made):
        graph, program, _, rhs, weights, layer = made
        other = ps.FullyConnectedParams.create_with_nz_ratio(ps.SparsityParams(1), 0.2, 5, 1, 8, 16)
        with pytest.raises(ValueError, match="the weights were made for"):
            ps.fully_connected_forward(graph, weights, rhs, other, program)
        with pytest.raises(ValueError, match="the weights were made with"):
            ps.fully_connected_forward(
                graph, weights, rhs, layer, program, {"shared_buckets": False}
            )

    def test_11_operands_are_padded_to_the_grain(self):
        for batch in (1, 3, 5):
            layer = ps.Layer(ps.plan(8, 6, batch, 1.0, 1, "float16", Target.mk2(tiles=3)))
            pattern = SparsePattern.full((8, 6))
            layer.set_weights(pattern, torch.ones(48).half())
            np.testing.assert_array_equal(layer.forward(np.ones((batch, 6))), 6)

    def test_17_lhs_not_sparse(self, made):
        graph, program, _, rhs, _, _ = made
        with pytest.raises(TypeError, match="lhs must be a SparseTensor"):
            ps.sparse_dense_matmul(graph, rhs, rhs, program)

    def test_18_lhs_of_another_operation(self, made):
        graph, program, _, rhs, weights, _ = made
        with pytest.raises(ValueError, match="made by create_sparse_dense_matmul_lhs"):
            ps.sparse_dense_matmul(graph, weights, rhs, program)

    @pytest.mark.parametrize(("left", "right"), [(True, False), (False, True)])
    def test_19_shape_of_the_rhs(self, made, left, right):
        graph, program, lhs, rhs, _, _ = made
        with pytest.raises(ValueError, match="rhs must be"):
            ps.sparse_dense_matmul(graph, lhs, rhs, program, left, right)

    def test_20_other_options_than_at_creation(self, made):
        graph, program, lhs, rhs, _, _ = made
        options = {"meta_info_bucket_oversize_proportion": 0.7}
        with pytest.raises(ValueError, match="lhs was made with"):
            ps.sparse_dense_matmul(graph, lhs, rhs, program, options=options)

    def test_21_embedding_update_without_grad_weight(self, made):
        graph, program, _, _, weights, layer = made
        indices = ps.create_indices_tensor(graph, layer, 2)
        slices = ps.create_slice_tensor(graph, "float32", layer, 2)
        with pytest.raises(ValueError, match="do_grad_w_pass=True"):
            ps.embedding_update_add(graph, weights, slices, indices, 1.0, program, layer)
