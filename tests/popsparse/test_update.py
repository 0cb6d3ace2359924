"""Pattern updates on the tile machine: scores, transfers, costs."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import dynsparse as ds
import popsparse
from dynsparse.ops.grow.scores import pool
from popsparse import estimate
from popsparse.machine import OutOfMemoryError, Target

ALL = "forward,grad_input,grad_weight"
TARGET = Target.bow(tiles=12)


def layer_of(out=96, in_=64, batch=8, block=4, dtype="float32", target=TARGET, **update):
    made = popsparse.plan(out, in_, batch, 0.3, block, dtype, target, passes=ALL)
    return popsparse.Layer(made, passes=(), update=update)


def host_scores(dy, x, pooling, block):
    """Return the scores of `ops.grow`, in float32."""
    return pool((dy.float().T @ x.float()).abs(), "sum" if pooling == "none" else pooling, block)


def operands(layer, dtype, exact):
    sizes, generator = layer.plan.sizes, torch.Generator().manual_seed(0)
    made = (torch.randn(sizes.z, n, generator=generator) for n in (sizes.x, sizes.y))
    # Sums of ones are the same in whatever order.
    return [(t.sign() if exact else t).to(dtype) for t in made]


@pytest.mark.parametrize("pooling", ["SUM", "AVG", "max", "none"])
@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scores_equal_the_host(dtype, block, pooling):
    layer = layer_of(block=block, dtype=str(dtype).split(".")[1], pooling=pooling)
    dy, x = operands(layer, dtype, exact=True)
    wanted = host_scores(dy, x, pooling.lower(), block)
    np.testing.assert_array_equal(layer.scores(dy, x), wanted)
    dy, x = operands(layer, dtype, exact=False)
    found, wanted = layer.scores(dy, x), host_scores(dy, x, pooling.lower(), block).numpy()
    # float16 rounds each gradient and each score once.
    near = {torch.float32: 1e-6, torch.float16: 2e-3}[dtype] * wanted.max()
    assert np.abs(found - wanted).max() <= near
    # So the order is the host's wherever scores are that far apart.
    order = np.argsort(-wanted, axis=None)
    apart = -np.diff(wanted.reshape(-1)[order]) > 2 * near
    ranks = np.empty(wanted.size, int)
    ranks[np.argsort(-found, axis=None, kind="stable")] = np.arange(wanted.size)
    for cut in np.flatnonzero(apart) + 1:
        assert ranks[order[:cut]].max() < cut


def test_pooling_divides_bytes_by_the_block_area():
    sent = {}
    for pooling in ("none", "sum", "avg", "max"):
        layer = layer_of(block=8, pooling=pooling)
        profile = layer.run("scores") if layer.set_pattern(pattern_of(layer)) is None else None
        sent[pooling] = profile.step("scores to host").to_host_bytes
    assert sent["none"] == 96 * 64 * 4
    assert sent["sum"] == sent["avg"] == sent["max"] == sent["none"] // 64


def pattern_of(layer, seed=0):
    sizes, params = layer.plan.sizes, layer.plan.params.sparsity_params
    return ds.SparsePattern.random(
        (sizes.x, sizes.y),
        0.3,
        block_size=params.block_dimensions[0],
        generator=torch.Generator().manual_seed(seed),
    )


def test_profile_lists_the_steps():
    layer = layer_of(optimizer_slots=1)
    pattern = pattern_of(layer)
    layer.set_weights(pattern, torch.ones(pattern.values_shape))
    layer.scores(*operands(layer, torch.float32, exact=False))
    down = layer.profiles["scores"]
    names = [step.name for step in down.steps if step.runs]
    for part in ("dense gradient/fetch", "dense gradient/dense product", "gather blocks"):
        assert f"scores/{part}" in names
    assert names[-4:] == [
        "scores/pool magnitudes",
        "scores/scores to host",
        "scores/values to host",
        "scores/optimizer slot 0 to host",
    ]
    values = layer.plan.tiles_used * layer.plan.buckets.nz_elements * 4
    assert down.to_host_bytes == 24 * 16 * 4 + 2 * values
    assert down.from_host_bytes == 0
    assert down.step("scores to host").host == np.ceil(24 * 16 * 4 / 3.75e9 * 1.85e9)
    # A share of 32 blocks on each of 12 tiles: 6 of them a worker, 8 vectors of 2 floats each.
    assert down.step("pool magnitudes").compute == 6 * (12 + 6 * (8 + 2 * 8))
    other = pattern_of(layer, seed=1)
    up = layer.rewire(other, torch.ones(other.values_shape))
    words = len(layer.encoding.meta_info)
    assert up.from_host_bytes == 2 * words + 2 * values
    assert [step.name for step in up.steps if step.runs] == [
        "rewire/meta-info from host",
        "rewire/values from host",
        "rewire/optimizer slot 0 from host",
    ]


def test_transfers_between_host_and_machine():
    made = popsparse.plan(96, 64, 8, 0.3, 4, "float32", TARGET, passes=ALL)
    layer = popsparse.Layer(made, update={"optimizer_slots": 2})
    before, after = pattern_of(layer), pattern_of(layer, seed=1)
    values = torch.randn(before.values_shape)
    layer.set_weights(before, values)
    dy, x = operands(layer, torch.float32, exact=False)
    layer.scores(dy, x)
    np.testing.assert_array_equal(layer.returned_values, values)
    fresh, state = torch.randn(2, *after.values_shape)
    layer.rewire(after, fresh, [state, -state])
    np.testing.assert_allclose(layer.forward(x), x @ after.to_dense(fresh).T, rtol=1e-4, atol=1e-4)
    layer.scores(dy, x)
    np.testing.assert_array_equal(layer.returned_values, fresh)
    for found, wanted in zip(layer.returned_slots, (state, -state), strict=True):
        np.testing.assert_array_equal(found, wanted)
    layer.rewire(before, values)
    layer.scores(dy, x)
    assert not any(slot.any() for slot in layer.returned_slots)
    with pytest.raises(ValueError, match="expected 2 optimizer slots, got 1"):
        layer.rewire(after, fresh, [state])


def test_large_gradient_is_transferred_in_parts():
    sizes = {"out": 256, "in_": 384, "batch": 4, "block": 16}
    whole = layer_of(**sizes)
    small = TARGET.with_(bytes_per_tile=70_000)
    layer = layer_of(**sizes, target=small)
    pieces = [s for s in layer.run("scores").steps if "scores to host" in s.name]
    assert len(pieces) > 1
    assert sum(step.to_host_bytes for step in pieces) == 16 * 24 * 4
    for step in pieces:
        assert step.runs == 1
    dy, x = operands(layer, torch.float32, exact=True)
    np.testing.assert_array_equal(layer.scores(dy, x), whole.scores(dy, x))
    assert layer.profiles["scores"].memory.max_tile_bytes <= 70_000
    with pytest.raises((ValueError, OutOfMemoryError), match="bytes"):
        layer_of(**sizes, target=TARGET.with_(bytes_per_tile=12_000))


def test_groups_and_dense_weights():
    params = popsparse.FullyConnectedParams(popsparse.SparsityParams(4), 0.3, 8, 2, 32, 48)
    options = {"do_grad_a_pass": True, "do_grad_w_pass": True}
    for more in ({}, {"plan_constraints": {"use_dense": True}}):
        made = popsparse.make_plan(TARGET, "float32", params, {**options, **more})
        layer = popsparse.Layer(made, update={})
        pattern = ds.SparsePattern.random((48, 32), 0.3, block_size=4)
        values = torch.randn(pattern.values_shape)
        layer.set_weights([pattern] * 2, [values, -values])
        dy, x = torch.randn(8, 96), torch.randn(8, 64)
        found = layer.scores(dy, x)
        for group in (0, 1):
            mine = dy[:, group * 48 : group * 48 + 48], x[:, group * 32 : group * 32 + 32]
            wanted = host_scores(*mine, "sum", 4)
            np.testing.assert_allclose(found[group], wanted, rtol=1e-4, atol=1e-4)
        layer.rewire([pattern] * 2, [-values, values])
        layer.scores(dy, x)
        np.testing.assert_array_equal(layer.returned_values, np.concatenate([-values, values]))


def test_bad_updates():
    with pytest.raises(ValueError, match="unknown option 'poling': did you mean 'pooling'"):
        layer_of(poling="sum")
    with pytest.raises(ValueError, match="pooling must be one of sum, avg, max, none, got 'min'"):
        layer_of(pooling="min")
    with pytest.raises(ValueError, match="optimizer_slots must be at most 16"):
        layer_of(optimizer_slots=17)
    made = popsparse.plan(96, 64, 8, 0.3, 4, "float32", TARGET)
    with pytest.raises(ValueError, match="build it with update="):
        popsparse.Layer(made).scores(np.ones((8, 96)), np.ones((8, 64)))
    with pytest.raises(ValueError, match="nothing to send"):
        popsparse.Layer(made, update={}).run("rewire")


def test_estimates_of_updates():
    torch.manual_seed(0)
    model = nn.Sequential(ds.nn.SparseLinear(64, 96, 0.2, 8), ds.nn.SparseLinear(96, 32, 0.3))
    x = torch.randn(24, 64)
    found = estimate(model, x, TARGET, update={"optimizer_slots": 1})
    plain = estimate(model, x, TARGET)
    assert (plain.update_cycles, plain.layers[0].update) == (0, None)
    assert found.cycles == plain.cycles
    first, second = (layer.update for layer in found.layers)
    assert found.update_cycles == first.cycles + second.cycles
    assert found.update_share(100) == pytest.approx(
        found.update_cycles / (found.update_cycles + 100 * found.cycles)
    )
    assert found.update_share(1000) < found.update_share(10) < 1
    assert sum(first.parts.values()) == pytest.approx(first.cycles)
    assert first.parts["scores to host"] == 311 + np.ceil(12 * 8 * 2 / 3.75e9 * 1.85e9)
    assert "pool magnitudes" not in second.parts  # single elements
    assert first.fits
    assert first.pieces == 1
    json.dumps(found.to_dict())
    assert "A pattern update" in found.summary()
    assert "pattern update" not in plain.summary()
    with pytest.raises(ValueError, match="unknown option"):
        estimate(model, x, TARGET, update={"slots": 1})
