"""Pattern updates on the tile machine: scores, what travels, and trainings that equal the CPU's."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse import popsparse
from dynsparse.machine import OutOfMemoryError, Target, estimate
from dynsparse.ops.grow.scores import pool

ALL = "forward,grad_input,grad_weight"
TARGET = Target.bow(tiles=12)


def layer_of(out=96, in_=64, batch=8, block=4, dtype="float32", target=TARGET, **update):
    made = popsparse.plan(out, in_, batch, 0.3, block, dtype, target, passes=ALL)
    return popsparse.Layer(made, passes=(), update=update)


def host_scores(dy, x, pooling, block):
    """What `ops.grow` ranks by, in float32."""
    return pool((dy.float().T @ x.float()).abs(), "sum" if pooling == "none" else pooling, block)


def operands(layer, dtype, exact):
    sizes, generator = layer.plan.sizes, torch.Generator().manual_seed(0)
    made = (torch.randn(sizes.z, n, generator=generator) for n in (sizes.x, sizes.y))
    # Sums of ones are the same in whatever order.
    return [(t.sign() if exact else t).to(dtype) for t in made]


@pytest.mark.parametrize("pooling", ["SUM", "AVG", "max", "none"])
@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scores_are_the_hosts(dtype, block, pooling):
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


def test_pooling_makes_block_area_times_fewer_bytes():
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


def test_the_profile_lists_the_steps():
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
    values = layer.plan.num_buckets * layer.plan.buckets.nz_elements * 4
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


def test_what_comes_down_and_goes_up():
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


def test_a_gradient_that_does_not_fit_comes_in_pieces():
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


# Trainings.


def pictures(count, generator):
    """Ten kinds of 28 x 28 pictures, with noise."""
    kinds = torch.randn(10, 784, generator=generator)
    labels = torch.arange(count) % 10
    return kinds[labels] + 0.5 * torch.randn(count, 784, generator=generator), labels


def train(target, dtype=torch.float32, *, block=4, micro=1, steps=24, **options):
    generator = torch.Generator().manual_seed(0)
    x, labels = pictures(32 * steps, generator)
    where = {} if target is None else {"target": target, **options}
    torch.manual_seed(1)
    model = nn.Sequential(
        ds.nn.SparseLinear(784, 320, 0.1, block, generator=generator, **where),
        nn.ReLU(),
        ds.nn.SparseLinear(320, 10, 0.5, generator=generator, **where),
    ).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = ds.RigL(
        model, optimizer, total_steps=steps, update_interval=6, drop_fraction=0.3, pooling="avg"
    )
    losses = []
    for batch, wanted in zip(x.to(dtype).split(32), labels.split(32), strict=True):
        optimizer.zero_grad()
        for part, right in zip(batch.chunk(micro), wanted.chunk(micro), strict=True):
            loss = nn.functional.cross_entropy(model(part), right) / micro
            loss.backward()
        trainer.step()
        losses.append(loss.item())
    return model, losses


@pytest.fixture(scope="module")
def on_cpu():
    return {dtype: train(None, dtype) for dtype in (torch.float32, torch.float64)}


def test_a_training_of_mnists_size_is_that_of_the_cpu(on_cpu):
    target = Target.bow(tiles=24)
    model, losses = train(target, target_options={"dense_grad": {"partials_type": "float32"}})
    assert losses[0] > 2
    assert losses[-1] < 0.3
    for other, wanted in on_cpu.values():
        assert losses == pytest.approx(wanted, rel=1e-3, abs=1e-4)
        for mine, theirs in zip(model, other, strict=True):
            if isinstance(mine, ds.nn.SparseLinear):
                assert mine.pattern == theirs.pattern
                torch.testing.assert_close(
                    mine.values.double(), theirs.values.double(), rtol=1e-3, atol=1e-4
                )
    profiles = popsparse.machine_profiles(model[0])
    assert set(profiles) == {"forward", "grad_input", "grad_weight", "scores", "rewire"} - {
        "grad_input"  # nobody asks for the gradient of the pictures
    }
    sent = [s.to_host_bytes for s in profiles["scores"].steps if "scores to host" in s.name]
    assert sum(sent) == 80 * 196 * 4
    assert profiles["rewire"].from_host_bytes > 0


def test_micro_batches():
    wanted = train(None, micro=2, steps=12)[0]
    found = train(TARGET, micro=2, steps=12)[0]
    assert found[0].pattern == wanted[0].pattern
    assert found[2].pattern == wanted[2].pattern


def test_histories_of_several_steps_grow_on_the_host():
    torch.manual_seed(0)
    layer = ds.nn.SparseLinear(32, 48, 0.3, 4, target=TARGET)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    trainer = ds.SNFS(layer, optimizer, total_steps=8, update_interval=2)
    before = layer.pattern
    for _ in range(4):
        layer(torch.randn(4, 32)).square().sum().backward()
        trainer.step()
        optimizer.zero_grad()
    assert layer.pattern != before
    assert "scores" not in popsparse.machine_profiles(layer)


def test_half_that_overflows_and_gradients_that_are_not_numbers():
    def one_step(loss, line):
        torch.manual_seed(0)
        layer = ds.nn.SparseLinear(64, 96, 0.3, 16, target=TARGET, dtype=torch.float16)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        trainer = ds.RigL(layer, optimizer, total_steps=4, update_interval=1)
        before = layer.pattern
        loss(layer(torch.ones(4, 64, dtype=torch.float16))).backward()
        with pytest.raises(ValueError, match=line):
            trainer.step()
        assert layer.pattern is before

    one_step(lambda y: (y * 1000).sum(), r"overflow torch\.float16: lower the scale")
    one_step(lambda y: (y * float("nan")).sum(), "NaN or infinity")


@pytest.mark.parametrize(
    "options",
    [
        {"available_memory_proportion": 0.3},
        {"meta_info_bucket_oversize_proportion": 1.0},
        {"partials_type": "float32"},
        {"optimise_for_speed": False},
        {"force_bucket_spills": True},
        {"use_actual_worker_split_costs": True},
        {"enable_structured_rearrangements": False},
        {"price_propagation": True},
        {"plan_constraints": {"partition": {"x": 2, "y": 3, "z": 2}}},
        {"plan_constraints": {"exchange": {"gradWExchangeBuckets": True}}},
        {"plan_constraints": {"use_dense": True}},
        {"shared_buckets": False},
        {"dense_grad": {"available_memory_proportion": 0.5, "partials_type": "float32"}},
    ],
    ids=str,
)
def test_options_of_the_planner_reach_it(options):
    block = 1 if "shared_buckets" in options else 4
    torch.manual_seed(0)
    here = ds.nn.SparseLinear(32, 48, 0.3, block)
    there = ds.nn.SparseLinear(32, 48, pattern=here.pattern, target=TARGET, target_options=options)
    there.load_state_dict(here.state_dict())
    x = torch.randn(8, 32)
    for layer in (here, there):
        layer(x).square().sum().backward()
    torch.testing.assert_close(there.values.grad, here.values.grad, rtol=1e-4, atol=1e-4)
    (made,) = there.executor.runner.layers.values()
    planned = popsparse.Options.parse(
        {k: v for k, v in options.items() if k != "dense_grad"}
    ).with_passes(grad_a=True, grad_w=True)
    assert made.plan.options == planned.repaired(made.plan.dtype, block == 1)
    there.executor.scores(there, [(x, torch.randn(8, 48))], "sum")
    assert there.executor.runner.update == popsparse.Update(**options.get("dense_grad", {}))
    there.values.data.mul_(2)
    torch.testing.assert_close(there(x), x @ there.to_dense().T + there.bias)


def test_passes_that_options_leave_out():
    layer = ds.nn.SparseLinear(32, 48, 0.3, target=TARGET, target_options={"do_grad_a_pass": False})
    layer(torch.randn(4, 32)).sum().backward()
    (made,) = layer.executor.runner.layers.values()
    assert [*made.plan.costs] == ["forward", "grad_weight"]
    with pytest.raises(ValueError, match="grad_input, which target_options leave out"):
        layer(torch.randn(4, 32).requires_grad_()).sum().backward()


def test_bad_options():
    def made(options, target=TARGET):
        return ds.nn.SparseLinear(32, 48, 0.3, target=target, target_options=options)

    with pytest.raises(ValueError, match="unknown option 'partial_type': did you mean"):
        made({"partial_type": "float16"})
    with pytest.raises(ValueError, match="unknown partition constraint 'w'"):
        made({"plan_constraints": {"partition": {"w": 1}}})
    with pytest.raises(ValueError, match="dense_grad must be a mapping of available_memory"):
        made({"dense_grad": {"pooling": "sum"}})
    with pytest.raises(ValueError, match="target_options are for a target"):
        made({"partials_type": "float16"}, None)
    with pytest.raises(TypeError, match="target_options must be a Mapping or None"):
        made("partials_type=float16")


@pytest.mark.parametrize("block", [1, 4])
def test_a_table_on_a_target(block):
    """Looked up, and tied to the logits: as on the CPU, and so is its growth."""
    found = {}
    ids = torch.tensor([[3, 7, 7], [0, 31, 3]])
    for target in (None, TARGET):
        torch.manual_seed(0)
        table = ds.nn.SparseEmbedding(32, 16, 0.3, block, target=target)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        trainer = ds.RigL(table, optimizer, total_steps=8, update_interval=2)
        for _ in range(4):
            optimizer.zero_grad()
            table.logits(table(ids) + 1).square().sum().backward()
            grad = table.values.grad.clone()
            trainer.step()
        found[target] = table.pattern, grad, table(ids)
    here, there = found.values()
    assert here[0] == there[0]
    for mine, theirs in zip(here[1:], there[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    profiles = popsparse.machine_profiles(table)
    assert set(profiles) >= {"slice", "gradient", "forward", "grad_input", "scores"}
    assert table(torch.zeros(0, 2, dtype=torch.int64)).shape == (0, 2, 16)
    for wrong, error in (
        (torch.tensor([32]), IndexError),
        (torch.tensor([-1]), IndexError),
        (torch.tensor([1.0]), TypeError),
    ):
        with pytest.raises(error, match="ids must be"):
            table(wrong)


def test_sparsify_onto_a_target():
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))

    generators = (torch.Generator().manual_seed(0) for _ in range(2))
    quiet = {"density": 0.3, "block_size": 4, "verbose": False}
    here, there = (
        ds.sparsify(model(), **quiet, generator=generator, **more)
        for generator, more in zip(
            generators,
            ({}, {"target": TARGET, "target_options": {"price_propagation": True}}),
            strict=True,
        )
    )
    x = torch.randn(5, 32)
    torch.testing.assert_close(there(x), here(x), rtol=1e-4, atol=1e-4)
    assert there[0].target == there[2].target == TARGET
    assert there[0].executor is not there[2].executor
    assert there[0].executor.options.planned.price_propagation
    pictures = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, 8))
    with pytest.raises(ValueError, match="the convolution '0' has no target"):
        ds.sparsify(pictures, **quiet, target=TARGET)
    assert isinstance(pictures[2], nn.Linear)


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
