"""The passes of a sparse fully connected layer on the machine equal float64."""

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynsparse.pattern import SparsePattern
from popsparse import dense
from popsparse.encoding.partitioner import Partitioner
from popsparse.layer import Layer
from popsparse.machine import Engine, Graph, Sequence, Target
from popsparse.planning.params import FullyConnectedParams, MatmulParams, SparsityParams
from popsparse.planning.plan import PASSES, PlanningCache
from popsparse.planning.search import make_plan, plan
from popsparse.products import (
    create_fully_connected_input,
    create_fully_connected_weights,
    create_sparse_dense_matmul_lhs,
    fully_connected_forward,
    fully_connected_grad_a,
    fully_connected_grad_w,
)
from popsparse.programs import codelets
from popsparse.programs.dense_weights import operations

TOLERANCE = {"float16": 5e-3, "float32": 1e-5}


def build(out, in_, batch, density, block, dtype, tiles=12, groups=1, planned=True, **options):
    """Build forward and optionally grad_input of a random matrix; return (engine, weights, ...)."""
    params = FullyConnectedParams.create_with_nz_ratio(
        SparsityParams(block), density, batch, groups, in_, out
    )
    graph, program = Graph(Target.mk2(tiles=tiles)), Sequence()
    weights = create_fully_connected_weights(graph, dtype, params, options)
    if planned:
        x = create_fully_connected_input(graph, dtype, params, options)
    else:
        x = graph.add_variable(dtype, [batch, groups * in_], "plain", tiles=0)
    y = fully_connected_forward(graph, weights, x, params, program, options)
    tensors = {"x": x, "y": y, "words": weights.meta_info, "values": weights.nz_values}
    if options.get("do_grad_a_pass"):
        tensors["dx"] = fully_connected_grad_a(graph, weights, y, params, program, options)
    for name, tensor in tensors.items():
        graph.add_handle(name, tensor)
    return Engine(graph, program), weights


def check(out, in_, batch, density, block, dtype, seed=0, groups=1, **more):
    engine, weights = build(out, in_, batch, density, block, dtype, groups=groups, **more)
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    patterns = [
        SparsePattern.random((out, in_), density, block_size=block, generator=generator)
        for _ in range(groups)
    ]
    values = [torch.randn(p.values_shape, generator=generator).to(kind) for p in patterns]
    x = torch.randn(batch, groups * in_, generator=generator).to(kind)
    one = groups == 1
    encoded = Partitioner(weights.plan).encode(
        patterns[0] if one else patterns, values[0] if one else values
    )
    engine.write("words", encoded.meta_info)
    engine.write("values", encoded.nz_values)
    engine.write("x", x)
    profile = engine.run()
    dense = torch.block_diag(
        *(p.to_dense(v).double() for p, v in zip(patterns, values, strict=True))
    )
    y = torch.from_numpy(engine.read("y")).double()
    close(y, x.double() @ dense.T, dtype)
    if more.get("do_grad_a_pass"):
        close(torch.from_numpy(engine.read("dx")).double(), y @ dense, dtype)
    return encoded, profile


def outcomes(seeds):
    """Yield cycles and results of one program with the pattern and values of each seed."""
    engine, weights = build(40, 48, 6, 0.3, 1, "float32", do_grad_a_pass=True)
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        pattern = SparsePattern.random((40, 48), 0.3, generator=generator)
        values = torch.randn(pattern.values_shape, generator=generator)
        encoded = Partitioner(weights.plan).encode(pattern, values)
        engine.write("words", encoded.meta_info)
        engine.write("values", encoded.nz_values)
        engine.write("x", torch.randn(6, 48, generator=generator))
        profile = engine.run()
        yield profile.cycles, engine.read("y").tobytes(), engine.read("dx").tobytes()


def test_buckets_may_be_decoded_again(monkeypatch):
    kept = list(outcomes([0, 1, 0]))
    assert kept[0] == kept[2] != kept[1]
    monkeypatch.setattr(codelets, "_KEPT_PATTERNS", 0)
    assert list(outcomes([0, 1, 0])) == kept


def close(found, wanted, dtype):
    scale = max(1.0, float(wanted.abs().max()))
    assert float((found - wanted).abs().max()) <= TOLERANCE[dtype] * scale


def test_groups():
    check(32, 48, 6, 0.3, 1, "float32", groups=3, do_grad_a_pass=True)
    check(32, 48, 6, 0.3, 8, "float16", groups=2, do_grad_a_pass=True)


def test_any_tensor_as_input():
    check(40, 30, 5, 0.3, 1, "float32", planned=False)


@given(
    out=st.integers(1, 20),
    in_=st.integers(1, 20),
    batch=st.integers(1, 9),
    block=st.sampled_from([1, 4]),
    density=st.floats(0, 1),
    dtype=st.sampled_from(["float16", "float32"]),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=20)
def test_any_shape(out, in_, batch, block, density, dtype, seed):
    check(
        out * block, in_ * block, batch, density, block, dtype, seed, tiles=6, do_grad_a_pass=True,
        meta_info_bucket_oversize_proportion=1.0,
    )  # fmt: skip


def test_bad_input():
    params = FullyConnectedParams.create_with_nz_ratio(SparsityParams(1), 0.1, 8, 1, 32, 32)
    graph, program = Graph(Target.mk2(tiles=4)), Sequence()
    weights = create_fully_connected_weights(graph, "float16", params)
    x = create_fully_connected_input(graph, "float16", params)
    wrong = graph.add_variable("half", [8, 31], tiles=0)
    with pytest.raises(ValueError, match=r"expected a tensor \[batch, input channels\]"):
        fully_connected_forward(graph, weights, wrong, params, program)
    with pytest.raises(TypeError, match="expected a tensor of float16, got float32"):
        fully_connected_forward(
            graph, weights, graph.add_variable("float", [8, 32], tiles=0), params, program
        )
    with pytest.raises(ValueError, match="do_grad_a_pass=True"):
        fully_connected_grad_a(graph, weights, x, params, program)
    product = MatmulParams.create_with_nz_ratio(SparsityParams(1), 0.1, 1, 32, 32, 8)
    with pytest.raises(ValueError, match="the operand of a product is sparse: leave out use_dense"):
        create_sparse_dense_matmul_lhs(
            graph, "float16", product, {"plan_constraints": {"use_dense": True}}
        )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("moves", [False, True], ids=["operands", "buckets"])
@pytest.mark.parametrize(("block", "dtype"), [(1, "float16"), (1, "float32"), (8, "float16")])
@pytest.mark.parametrize("partition", [(3, 2, 1), (2, 1, 2), (1, 2, 3), (2, 2, 2), (1, 1, 2)])
def test_grad_weight(partition, block, dtype, moves, groups):
    options = {
        "do_grad_w_pass": True,
        "force_bucket_spills": partition[:2] != (1, 1),
        "plan_constraints": {
            "partition": dict(zip("xyz", partition, strict=True)),
            "exchange": {"grad_w_exchange_buckets": moves},
        },
    }
    sizes = (SparsityParams(block), 0.3, 48, groups, 48, 48)
    params = FullyConnectedParams.create_with_nz_ratio(*sizes)
    layer = Layer(make_plan(Target.mk2(tiles=16), dtype, params, options))
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    patterns = [
        SparsePattern.random((48, 48), 0.3, block_size=block, generator=generator)
        for _ in range(groups)
    ]
    if groups == 1:
        layer.set_pattern(patterns[0])
    else:
        layer.set_pattern(patterns)
    x = torch.randn(48, groups * 48, generator=generator).to(kind)
    dy = torch.randn(48, groups * 48, generator=generator).to(kind)
    found = torch.from_numpy(layer.grad_weight(dy, x)).double()
    wanted = dy.double().T @ x.double()
    parts = [wanted[48 * g : 48 * g + 48, 48 * g : 48 * g + 48] for g in range(groups)]
    close(found, torch.cat([p.values_of(w) for p, w in zip(patterns, parts, strict=True)]), dtype)


@pytest.mark.parametrize("block", [1, 4])
def test_matrix_without_blocks(block):
    params = FullyConnectedParams.create_with_nz_ratio(SparsityParams(block), 0, 4, 1, 16, 16)
    passes = {"do_grad_a_pass": True, "do_grad_w_pass": True}
    layer = Layer(make_plan(Target.mk2(tiles=4), "float32", params, passes))
    pattern = SparsePattern.random((16, 16), 0, block_size=block)
    layer.set_weights(pattern, torch.empty(pattern.values_shape))
    x = torch.ones(4, 16)
    assert not layer.forward(x).any()
    assert not layer.grad_input(x).any()
    assert layer.grad_weight(x, x).shape == pattern.values_shape


def test_layer_checks_its_use():
    layer = Layer(make_plan(Target.mk2(tiles=4), "float32", _params(8)))
    pattern = SparsePattern.random((32, 32), 0.1)
    with pytest.raises(ValueError, match="set a pattern first"):
        layer.set_values(torch.ones(pattern.nnz))
    with pytest.raises(ValueError, match="set a pattern first"):
        layer.forward(torch.ones(8, 32))
    with pytest.raises(ValueError, match="the plan is for forward"):
        Layer(layer.plan, passes=["grad_weight"])
    with pytest.raises(ValueError, match="the plan is for forward, not for grad_input: pass"):
        layer.grad_input(torch.ones(8, 32))
    some = Layer(_plan_of_all_passes(), passes=["forward"])
    with pytest.raises(ValueError, match="the layer is for forward, not for grad_weight: pass"):
        some.grad_weight(torch.ones(8, 32), torch.ones(8, 32))
    layer.set_weights(pattern, torch.ones(pattern.nnz))
    with pytest.raises(ValueError, match=r"expected \[8, 32\], got \[8, 31\]"):
        layer.forward(torch.ones(8, 31))


def test_products_need_the_values_of_a_new_pattern(tmp_path):
    layer = Layer(_plan_of_all_passes())
    generator = torch.Generator().manual_seed(0)
    old, new = (SparsePattern.random((32, 32), 0.1, generator=generator) for _ in range(2))
    x, values = torch.randn(8, 32), torch.randn(new.nnz)
    layer.set_weights(old, values)
    layer.set_pattern(new)
    for use in (layer.forward, layer.grad_input, lambda _: layer.save(tmp_path / "layer")):
        with pytest.raises(ValueError, match="values of the new pattern are not set: call set_val"):
            use(x)
    wanted = new.values_of(x.double().T @ x.double())
    close(torch.from_numpy(layer.grad_weight(x, x)).double(), wanted, "float32")
    layer.set_values(values)
    dense = new.to_dense(values).double()
    close(torch.from_numpy(layer.forward(x)).double(), x.double() @ dense.T, "float32")
    layer.save(tmp_path / "layer")


def test_profile_is_equal_without_numerics():
    pattern = SparsePattern.random((32, 32), 0.1, generator=torch.Generator().manual_seed(0))
    wanted = make_plan(Target.mk2(tiles=4), "float16", _params(8), {"do_grad_w_pass": True})
    with_numbers, without = Layer(wanted), Layer(wanted, numerics=False)
    with_numbers.set_weights(pattern, torch.ones(pattern.nnz).half())
    without.set_pattern(pattern)
    with_numbers.forward(torch.ones(8, 32))
    with_numbers.grad_weight(torch.ones(8, 32), torch.ones(8, 32))
    for name in ("forward", "grad_weight"):
        assert without.run(name).cycles == with_numbers.profiles[name].cycles


def _plan_of_all_passes():
    return plan(32, 32, 8, 0.1, dtype="float32", target=Target.mk2(tiles=4), passes=PASSES)


def _params(batch):
    return FullyConnectedParams.create_with_nz_ratio(SparsityParams(1), 0.1, batch, 1, 32, 32)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("sizes", [(40, 24, 7), (64, 128, 48), (3, 5, 100)])
def test_dense_weights(sizes, dtype, groups):
    out, in_, batch = sizes
    options = {
        "do_grad_a_pass": True,
        "do_grad_w_pass": True,
        "plan_constraints": {"use_dense": True},
    }
    params = FullyConnectedParams.create_with_nz_ratio(
        SparsityParams(1), 0.3, batch, groups, in_, out
    )
    layer = Layer(make_plan(Target.mk2(tiles=20), dtype, params, options))
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    patterns = [SparsePattern.random((out, in_), 0.3, generator=generator) for _ in range(groups)]
    values = [torch.randn(p.nnz, generator=generator).to(kind) for p in patterns]
    if groups == 1:
        layer.set_weights(patterns[0], values[0])
    else:
        layer.set_weights(patterns, values)
    x = torch.randn(batch, groups * in_, generator=generator).to(kind)
    dy = torch.randn(batch, groups * out, generator=generator).to(kind)
    dense = [p.to_dense(v).double() for p, v in zip(patterns, values, strict=True)]
    whole = torch.block_diag(*dense)
    close(torch.from_numpy(layer.forward(x)).double(), x.double() @ whole.T, dtype)
    close(torch.from_numpy(layer.grad_input(dy)).double(), dy.double() @ whole, dtype)
    product = dy.double().T @ x.double()
    parts = [product[out * g : out * (g + 1), in_ * g : in_ * (g + 1)] for g in range(groups)]
    wanted = torch.cat([p.values_of(w) for p, w in zip(patterns, parts, strict=True)])
    close(torch.from_numpy(layer.grad_weight(dy, x)).double(), wanted, dtype)


def test_plan_with_dense_weights_contains_its_products():
    def made(passes, **options):
        return plan(64, 32, 8, 0.3, 1, "float16", target, passes=passes, options=options)

    target, constrained = Target.mk2(tiles=20), {"plan_constraints": {"use_dense": True}}
    assert made("grad_weight").dense == {}
    assert list(made("grad_input", **constrained).dense) == ["forward", "grad_input"]
    # The gradient that grad_weight reads lies as grad_input would want it.
    assert list(made("grad_weight", **constrained).dense) == list(PASSES)
    assert Layer(made("grad_weight", **constrained)).run("grad_weight").cycles > 0
    found = made("forward", **constrained)
    copied = pickle.loads(pickle.dumps(found))
    assert copied == found
    assert copied.dense == found.dense
    # What the plan brings is what is laid out and run.
    on_one_tile = dense.plan(64, 32, 8, "float16", target.with_(tiles=1))
    slow = replace(found, dense={"forward": on_one_tile})
    assert Layer(slow).run("forward").cycles > Layer(copied).run("forward").cycles


@pytest.mark.parametrize("use_dense", [False, True])
def test_grad_weight_needs_only_the_meta_info(use_dense):
    constraints = {"use_dense": True} if use_dense else {}
    options = {"do_grad_w_pass": True, "plan_constraints": constraints}
    params = FullyConnectedParams.create_with_nz_ratio(SparsityParams(4), 0.3, 8, 1, 16, 12)
    graph, program, cache = Graph(Target.mk2(tiles=8)), Sequence(), PlanningCache()
    weights = create_fully_connected_weights(graph, "float32", params, options, cache)
    x = create_fully_connected_input(graph, "float32", params, options, cache)
    dy = graph.add_variable("float32", [8, 12], "dy", tiles=0)
    y = fully_connected_forward(graph, weights, x, params, program, options, cache)
    dw = fully_connected_grad_w(graph, weights.meta_info, dy, x, params, program, options, cache)
    assert (len(cache), cache.hits) == (1, 3)  # One plan serves all four.
    for name, tensor in {"x": x, "dy": dy, "y": y, "dw": dw, "words": weights.meta_info}.items():
        graph.add_handle(name, tensor)
    graph.add_handle("values", weights.nz_values)
    generator = torch.Generator().manual_seed(0)
    pattern = SparsePattern.random((12, 16), 0.3, block_size=4, generator=generator)
    values = torch.randn(pattern.values_shape, generator=generator)
    encoded = operations(weights.plan).partitioner(weights.plan).encode(pattern, values)
    engine = Engine(graph, program)
    given = {"x": torch.randn(8, 16, generator=generator)}
    given["dy"] = torch.randn(8, 12, generator=generator)
    for name, array in given.items():
        engine.write(name, array)
    engine.write("values", encoded.nz_values)
    if not use_dense:
        engine.write("words", encoded.meta_info)
    engine.run()
    found = torch.as_tensor(encoded.pattern.gather(engine.read("dw"))).double()
    expected = pattern.values_of(given["dy"].double().T @ given["x"].double())
    close(found.reshape(expected.shape), expected, "float32")


def test_meta_info_of_another_plan_raises():
    params = FullyConnectedParams.create_with_nz_ratio(SparsityParams(4), 0.3, 8, 1, 16, 12)
    graph, options = Graph(Target.mk2(tiles=8)), {"do_grad_w_pass": True}
    x, words = (
        graph.add_variable(t, s, t, 0) for t, s in (("float", [8, 16]), ("unsigned short", [7]))
    )
    with pytest.raises(ValueError, match=r"expected meta-info of uint16 \[\d+\]"):
        fully_connected_grad_w(graph, words, x, x, params, Sequence(), options)
