"""`target_options` of layers on the tile machine, and `sparsify` with a target."""

import pytest
import torch
from torch import nn

import dynsparse as ds
import popsparse
from popsparse.machine import Target

TARGET = Target.bow(tiles=12)


@pytest.mark.sampled(4)
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
def test_planner_options_are_passed_on(options):
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


def test_passes_disabled_by_options():
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
    with pytest.raises(ValueError, match="dense_grad must be a mapping of available_memory"):
        made({"dense_grad": {"pooling": "sum"}})
    with pytest.raises(ValueError, match="option partials_type is given twice, once as 'partials"):
        made({"partials_type": "float16", "partialsType": "float32"})
    with pytest.raises(ValueError, match="target_options need a target"):
        made({"partials_type": "float16"}, None)
    with pytest.raises(TypeError, match="target_options must be a mapping or None"):
        made("partials_type=float16")


@pytest.mark.parametrize("block", [1, 4])
def test_embedding_on_a_target(block):
    """Look-ups, tied logits and growth equal the CPU."""
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
            grad = table.pattern.by_rows(table.values.grad.clone())
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


def test_sparsify_with_target():
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
    images = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, 8))
    with pytest.raises(ValueError, match="the convolution '0' cannot run on a target"):
        ds.sparsify(images, **quiet, target=TARGET)
    assert isinstance(images[2], nn.Linear)
