"""The execution model: kernels compared with the estimator, hand-made patterns, spills, passes."""

import numpy as np
import pytest
import torch

from dynsparse.pattern import SparsePattern
from popsparse import timing as execution_cycles
from popsparse.machine.dtypes import FLOAT, HALF
from popsparse.machine.target import Target
from popsparse.planning import cycles as vertex_cycles
from popsparse.planning.params import FullyConnectedParams, MatmulParams, SparsityParams
from popsparse.planning.search import make_plan, matmul_plan
from popsparse.plans import predict, tile_memory


def pattern(size, density, edge=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return SparsePattern.random((size, size), density=density, block_size=edge, generator=generator)


@pytest.mark.parametrize(("dtype", "exact"), [(HALF, (4, 8)), (FLOAT, (2, 4))])
def test_special_batches_equal_the_estimator(dtype, exact):
    for z in exact:
        kernel = execution_cycles.element_product(z, dtype)
        estimate = vertex_cycles.element_forward(5, 20, z, dtype, 6)
        assert 6 * kernel.worker(5, 100) + kernel.supervisor + 30 == estimate


def test_general_batches_pay_for_each_vector():
    """Instructions by hand: 13 per row, 17 + 3 y for each 8, 11 + 2 y for 4 more."""
    kernel = execution_cycles.element_product(28, HALF)
    assert kernel.worker(2, 2 * 5) == 33 + 2 * (13 + 3 * (17 + 3 * 5) + 4 + 11 + 2 * 5)
    kernel = execution_cycles.element_product(11, HALF)
    assert kernel.worker(1, 6) == 33 + 13 + 17 + 3 * 6 + 4 + 1 + 3 * (10 + 2 * 6)
    kernel = execution_cycles.element_product(14, FLOAT)
    assert kernel.worker(1, 7) == 30 + 13 + 3 * (12 + 3 * 7) + 4 + 8 + 2 * 7


def test_grad_input_kernels():
    """Separate buckets: 13 + 3 y for each 8, 9 + 2 y for 4 more; shared ones: 9 + 2 + 5 z / 4 per
    iteration."""
    kernel = execution_cycles.element_product(28, HALF, grad_input=True)
    assert kernel.worker(1, 5) == 32 + 12 + 3 * (13 + 3 * 5) + 4 + 9 + 2 * 5
    kernel = execution_cycles.element_transposed(64, HALF)
    assert kernel.worker(3, 7) == 26 + 3 * 22 + 7 * (11 + 5 * 16)
    kernel = execution_cycles.element_transposed(7, FLOAT)
    assert kernel.worker(3, 7) == 23 + 3 * 24 + 7 * (10 + 3 * 3 + 4)


@pytest.mark.parametrize("z", [1, 2, 5, 64])
@pytest.mark.parametrize("edge", [4, 8, 16])
@pytest.mark.parametrize("retain", [True, False])
def test_block_kernel_is_linear(z, edge, retain):
    kernel = execution_cycles.block_product(z, (edge, edge), HALF, HALF, 16, retain=retain)
    found = 6 * kernel.worker(3, 3 * 7) + kernel.supervisor
    found += 3 * kernel.by_row + 3 * 7 * kernel.by_each
    sizes = ((edge, edge), HALF, HALF, 16, 6)
    assert found == vertex_cycles.block_forward(3, 7, z, *sizes, retain=retain)


def test_half_with_float_partials_loads_twice():
    """16 x 16 blocks: 32 products per cycle with float32 partials, 64 with float16."""

    def rate(partials):
        kernel = execution_cycles.block_product(6000, (16, 16), HALF, partials, 16, retain=True)
        return 256 * 6000 / int(kernel.each)

    assert rate(FLOAT) == pytest.approx(32, rel=0.01)
    assert rate(HALF) == pytest.approx(64, rel=0.01)


@pytest.mark.parametrize(("bytes_", "cycles"), [(0, 72), (8, 78), (48, 78), (49, 84)])
def test_zeroing_takes_one_instruction_per_word(bytes_, cycles):
    assert vertex_cycles.clear_memory(bytes_, 6) == cycles


def plan_for(size=512, edge=1, density=0.1, batch=64, tiles=24, dtype="float16", **options):
    params = FullyConnectedParams(SparsityParams(edge), density, batch, 1, size, size)
    asked = {"do_grad_a_pass": True, "do_grad_w_pass": True, **options}
    return make_plan(Target(tiles=tiles), dtype, params, asked)


@pytest.mark.parametrize("edge", [1, 4, 8, 16])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("move", [False, True])
def test_all_passes_are_predicted(edge, dtype, move):
    constraint = {"exchange": {"grad_w_exchange_buckets": move}}
    plan = plan_for(edge=edge, dtype=dtype, plan_constraints=constraint)
    found = predict(plan, pattern(512, 0.1, edge))
    assert list(found) == ["forward", "grad_input", "grad_weight"]
    nnz = pattern(512, 0.1, edge).nnz * edge * edge
    for name, time in found.items():
        # The estimate and the prediction are of the same product: within a small factor.
        assert 0.3 < time.cycles / plan.costs[name].cycles < 4
        assert time.products == 2 * nnz * 64
        figures = time.to_dict()
        assert figures["cycles"] == (
            figures["compute_cycles"] + figures["exchange_cycles"] + figures["sync_cycles"]
        )


def test_separate_grad_input_buckets():
    shared = predict(plan_for(), pattern(512, 0.1))["grad_input"]
    own = predict(plan_for(shared_buckets=False), pattern(512, 0.1))["grad_input"]
    assert own.cycles != shared.cycles


def test_fullest_tile_determines_the_time():
    """The same number of nonzeros, spread evenly or concentrated in one corner."""
    options = {"meta_info_bucket_oversize_proportion": 9.0}
    plan = plan_for(density=0.01, **options)
    even = predict(plan, pattern(512, 0.01))["forward"]
    side = 52
    rows, cols = np.divmod(np.arange(2622), side)
    corner = SparsePattern(rows, cols, shape=(512, 512))
    crowded = predict(plan, corner)["forward"]
    assert crowded.compute_cycles > 1.5 * even.compute_cycles


def test_spills_cost_propagation_steps():
    plan = plan_for(edge=4, force_bucket_spills=True)
    calm = predict(plan_for(edge=4), pattern(512, 0.1, 4))["forward"]
    spilt = predict(plan, pattern(512, 0.1, 4))["forward"]
    assert calm.propagation_steps == 0
    assert spilt.propagation_steps >= plan.partition.z
    assert spilt.cycles > calm.cycles


def test_sync_is_a_cost_of_the_target():
    plan = plan_for(edge=4)
    loud = make_plan(plan.target.with_(sync_cycles=1000), "float16", plan.params, plan.options)
    a, b = (predict(p, pattern(512, 0.1, 4))["forward"] for p in (plan, loud))
    assert b.sync_cycles * plan.target.sync_cycles == 1000 * a.sync_cycles > 0
    assert (a.compute_cycles, a.exchange_cycles) == (b.compute_cycles, b.exchange_cycles)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "batch"), [("float16", 64), ("float16", 256), ("float32", 256)])
def test_estimated_propagation_is_better_for_overflowing_patterns(dtype, batch):
    params = MatmulParams(SparsityParams(16), 1 / 16, 1, 4096, 4096, batch)
    times = []
    for price in (False, True):
        plan = matmul_plan(Target.bow(), dtype, params, {"price_propagation": price})
        found = [predict(plan, pattern(4096, 1 / 16, 16, seed)) for seed in range(12)]
        times.append(np.mean([sum(t.cycles for t in f.values()) for f in found]))
    plain, priced = times
    assert priced < 0.95 * plain


def test_estimated_propagation_without_overflow_changes_nothing():
    params = MatmulParams(SparsityParams(), 1 / 16, 1, 4096, 4096, 256)
    plain, priced = (
        matmul_plan(Target.bow(), "float16", params, {"price_propagation": price})
        for price in (False, True)
    )
    assert plain.partition == priced.partition


def test_plan_larger_than_memory_raises():
    params = MatmulParams(SparsityParams(), 1 / 16, 1, 4096, 4096, 4096)
    plan = matmul_plan(Target.bow(), "float16", params)
    memory = tile_memory(plan)
    assert plan.memory_bound is None
    assert memory.needed > memory.available
    small = MatmulParams(SparsityParams(), 1 / 16, 1, 4096, 4096, 64)
    assert tile_memory(matmul_plan(Target.bow(), "float16", small)).fits


def test_groups():
    params = FullyConnectedParams(SparsityParams(4), 0.1, 64, 3, 256, 256)
    plan = make_plan(Target(tiles=24), "float16", params, {"do_grad_a_pass": True})
    patterns = [pattern(256, 0.1, 4, seed) for seed in range(3)]
    found = predict(plan, patterns)["forward"]
    assert found.products == 2 * 64 * 16 * sum(p.nnz for p in patterns)
    assert found.cycles > 0


@pytest.mark.parametrize("edge", [1, 4])
@pytest.mark.parametrize("density", [0.0, 1.0])
def test_empty_and_full(edge, density):
    plan = plan_for(size=128, edge=edge, density=density, batch=5, tiles=6)
    found = predict(plan, pattern(128, density, edge))
    assert all(time.cycles > 0 for time in found.values())
    assert all(time.propagation_steps == 0 for time in found.values())
