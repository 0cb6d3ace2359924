"""Updates by the trainer, compared with hand-computed cases, and interplay with torch features."""

import copy

import pytest
import torch
from torch import nn

from dynsparse.nn import SparseLinear
from dynsparse.ops import capture
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.training import (
    SET,
    ConstantSchedule,
    GlobalBudget,
    GradientGrowth,
    LayerBudget,
    RigL,
    SoftBudget,
    SparseTrainer,
    Static,
)

EVERY = ConstantSchedule(total_steps=1000, update_interval=1, drop_fraction=0.5)


def small_layer(block_size=1):
    """Make 2 x 3 blocks, of which 0, 2, 3 and 5 are present with magnitudes 4, 1, 2, 3."""
    b = block_size
    pattern = SparsePattern([0, 0, 1, 1], [0, 2, 0, 2], shape=(2 * b, 3 * b), block_size=b)
    layer = SparseLinear(3 * b, 2 * b, bias=False, pattern=pattern)
    with torch.no_grad():
        sizes = torch.tensor([4.0, -1.0, 2.0, -3.0]).view(-1, *[1] * (layer.values.dim() - 1))
        layer.values.copy_(sizes.expand_as(layer.values))
    return layer


def step_with_gradient(layer, trainer, gradient):
    """Take a step whose dY^T X is `gradient` [out, in]."""
    trainer.optimizer.zero_grad()
    x = torch.eye(layer.in_features)
    layer(x).backward(gradient.t())
    return trainer.step()


# In block coordinates. The free positions are 1 and 4; 2 is the most wanted of all.
GRADIENT = torch.tensor([[0.0, 0.5, 9.0], [0.0, 0.7, 0.0]])


def test_dropped_positions_stay_out_by_default():
    layer = small_layer()
    trainer = RigL(layer, torch.optim.SGD(layer.parameters(), lr=1e-9), schedule=EVERY)
    rewirings = step_with_gradient(layer, trainer, GRADIENT)
    # The magnitudes 1 and 2 (positions 2 and 3) leave; 1 and 4 are all there is to grow.
    assert list(rewirings) == [""]
    assert isinstance(rewirings[""], Rewiring)
    assert layer.pattern.flat.tolist() == [0, 1, 4, 5]
    assert layer.values.tolist() == pytest.approx([4, 0, 0, -3])
    assert rewirings[""].after == layer.pattern
    assert rewirings[""].dropped.tolist() == [1, 2]


def test_regrown_blocks_keep_their_values():
    layer = small_layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-9, momentum=0.9)
    trainer = RigL(layer, optimizer, schedule=EVERY, regrow_dropped=True)
    rewiring = step_with_gradient(layer, trainer, GRADIENT)[""]
    # Position 2 leaves and comes back as it was; position 3 makes room for 4.
    assert layer.pattern.flat.tolist() == [0, 2, 4, 5]
    assert layer.values.tolist() == pytest.approx([4, -1, 0, -3])
    assert rewiring.dropped.tolist() == [2]
    assert rewiring.grown.tolist() == [2]
    assert optimizer.state[layer.values]["momentum_buffer"].tolist() == [0, 9, 0, 0]


def test_blocks():
    layer = small_layer(2)
    trainer = RigL(
        layer, torch.optim.SGD(layer.parameters(), lr=1e-9), pooling="max",
        schedule=ConstantSchedule(10, 1, 0.25),
    )  # fmt: skip
    gradient = torch.zeros(4, 6)
    gradient[0, 2:4] = gradient[1, 2:4] = 0.4  # block 1: sum 1.6, maximum 0.4
    gradient[3, 3] = -0.9  # block 4
    step_with_gradient(layer, trainer, gradient)
    # The slot of block 1 goes to block 4.
    assert layer.pattern.flat.tolist() == [0, 4, 3, 5]
    assert layer.values[:, 1, 0].tolist() == pytest.approx([4, 0, 2, -3])


def test_gradients_and_optimizer_state_follow_the_pattern():
    layer = small_layer()
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-9)
    trainer = RigL(layer, optimizer, schedule=EVERY)
    gradient = torch.tensor([[1.0, 5.0, 2.0], [3.0, 6.0, 4.0]])
    parameter = layer.values
    step_with_gradient(layer, trainer, gradient)
    assert layer.values is parameter
    # Of the gradients 1, 2, 3, 4 those of the slots 0 and 3 survive.
    assert layer.values.grad.tolist() == [1, 0, 0, 4]
    state = optimizer.state[layer.values]
    torch.testing.assert_close(state["exp_avg"], torch.tensor([0.1, 0, 0, 0.4]))
    torch.testing.assert_close(state["exp_avg_sq"], torch.tensor([0.001, 0, 0, 0.016]))
    assert float(state["step"]) == 1


@pytest.mark.parametrize("start", [0.25, lambda layer, rewiring: torch.tensor([0.5, -0.5])])
def test_initial_value_of_grown_weights(start):
    layer = small_layer()
    trainer = RigL(
        layer, torch.optim.SGD(layer.parameters(), lr=1e-9), schedule=EVERY, initial_value=start
    )
    step_with_gradient(layer, trainer, GRADIENT)
    expected = [4, 0.5, -0.5, -3] if callable(start) else [4, 0.25, 0.25, -3]
    assert layer.values.tolist() == pytest.approx(expected)


def test_custom_drop_score():
    layer = small_layer()
    trainer = RigL(
        layer, torch.optim.SGD(layer.parameters(), lr=1e-9), schedule=EVERY,
        drop_score=lambda values: values.detach(),  # the most negative leave
    )  # fmt: skip
    step_with_gradient(layer, trainer, GRADIENT)
    assert layer.pattern.flat.tolist() == [0, 1, 3, 4]


def test_full_and_nearly_full_layers():
    full = SparseLinear(4, 4, density=1.0)
    nearly = SparseLinear(4, 4, pattern=SparsePattern.from_flat(torch.arange(15), shape=(4, 4)))
    model = nn.Sequential(full, nearly)
    trainer = RigL(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=EVERY)
    model(torch.randn(3, 4)).sum().backward()
    rewirings = trainer.step()
    assert list(rewirings) == ["1"]  # one position is free there, none in the full one
    assert len(rewirings["1"].grown) == 1
    assert full.density == 1


@pytest.mark.parametrize("regrow_dropped", [False, True])
def test_set_grows_random_free_positions(regrow_dropped, generator):
    layer = SparseLinear(20, 20, density=0.3, generator=generator)
    trainer = SET(
        layer, torch.optim.SGD(layer.parameters(), lr=0.1), schedule=EVERY,
        regrow_dropped=regrow_dropped, seed=2,
    )  # fmt: skip
    for _ in range(5):
        before = layer.pattern
        layer(torch.randn(4, 20)).sum().backward()
        rewiring = trainer.step()[""]
        grown = layer.pattern.flat[rewiring.grown]
        assert not before.contains(grown).any()
        assert layer.pattern.nnz == before.nnz == 120
        assert (len(grown) == 60) or (regrow_dropped and 40 < len(grown) < 60)


def make_model():
    g = torch.Generator().manual_seed(3)
    return nn.Sequential(
        SparseLinear(12, 16, density=0.3, generator=g, dtype=torch.float64),
        nn.Tanh(),
        SparseLinear(16, 8, density=0.3, generator=g, block_size=2, dtype=torch.float64),
    )


def patterns(model):
    return [m.pattern for m in model if isinstance(m, SparseLinear)]


def test_gradient_accumulation_equals_one_big_batch():
    x = torch.randn(24, 12, dtype=torch.float64)
    whole, parts = make_model(), make_model()
    trainers = [
        RigL(m, torch.optim.SGD(m.parameters(), lr=0.1), schedule=EVERY) for m in (whole, parts)
    ]
    for _ in range(3):
        for trainer in trainers:
            trainer.optimizer.zero_grad()
        whole(x).square().sum().backward()
        for piece in x.split([7, 1, 16]):
            parts(piece).square().sum().backward()
        assert trainers[0].step().keys() == trainers[1].step().keys()
        assert patterns(whole) == patterns(parts)
        for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
            torch.testing.assert_close(p, q)


def test_layer_used_twice_accumulates_both_uses():
    layer = SparseLinear(6, 6, density=0.3, dtype=torch.float64)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    trainer = RigL(model, torch.optim.SGD(model.parameters(), lr=0.0), schedule=EVERY)
    assert list(trainer.layers) == ["0"]
    dense = layer.to_dense().detach().requires_grad_()
    before, x = layer.pattern, torch.randn(5, 6, dtype=torch.float64)
    model(x).square().sum().backward()
    hidden = torch.tanh(nn.functional.linear(x, dense, layer.bias))
    nn.functional.linear(hidden, dense, layer.bias).square().sum().backward()
    gain = dense.grad.abs().masked_fill(before.to_mask(), -1).flatten()
    grown = trainer.step()["0"].grown
    assert set(layer.pattern.flat[grown].tolist()) == set(gain.topk(len(grown)).indices.tolist())


def test_captures_only_in_steps_with_an_update():
    layer = SparseLinear(8, 8, density=0.3)
    trainer = RigL(
        layer, torch.optim.SGD(layer.parameters(), lr=0.1), schedule=ConstantSchedule(100, 3, 0.3)
    )
    for step in range(1, 8):
        layer(torch.randn(2, 8)).sum().backward()
        assert capture.is_open(layer.index.row_ptr) == (step % 3 == 0)
        trainer.step()
        assert capture.is_open(layer.index.row_ptr) == (step % 3 == 2)


def test_deleted_trainer_captures_nothing():
    layer = SparseLinear(8, 8, density=0.3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    trainer = RigL(layer, optimizer, schedule=EVERY)
    trainer = RigL(layer, optimizer, schedule=EVERY)
    assert capture.is_open(layer.index.row_ptr)  # the end of the first leaves that of the second
    layer(torch.randn(2, 8)).sum().backward()
    assert trainer.step() is not None
    del trainer
    assert not capture.is_open(layer.index.row_ptr)


def test_set_and_static_capture_nothing():
    layer = SparseLinear(8, 8, density=0.3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for trainer in (SET(layer, optimizer, schedule=EVERY), Static(layer, optimizer)):
        layer(torch.randn(2, 8)).sum().backward()
        trainer.step()
        assert not capture.is_open(layer.index.row_ptr)


def test_clipping_schedulers_and_parameter_groups():
    model = make_model()
    groups = [
        {"params": [model[0].values], "lr": 0.1, "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p is not model[0].values]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    trainer = RigL(model, optimizer, total_steps=20, update_interval=4)
    updates = 0
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 12, dtype=torch.float64)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        updates += trainer.step() is not None
        scheduler.step()
    assert updates == 3
    assert optimizer.param_groups[0]["lr"] < 1e-6
    assert all(p.isfinite().all() for p in model.parameters())


def test_frozen_layers_keep_their_pattern():
    model = make_model()
    model[0].values.requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    trainer = RigL(model, torch.optim.SGD(trainable, lr=0.1), schedule=EVERY)
    model(torch.randn(4, 12, dtype=torch.float64)).sum().backward()
    assert list(trainer.step()) == ["2"]


def test_layer_without_gradient_keeps_its_pattern():
    model = make_model()
    trainer = RigL(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=EVERY)
    model[2](torch.randn(4, 16, dtype=torch.float64)).sum().backward()
    assert list(trainer.step()) == ["2"]


def test_failing_update_changes_no_layer():
    model = make_model()
    trainer = RigL(model, torch.optim.SGD(model.parameters(), lr=0.0), schedule=EVERY)
    before = patterns(model)
    model[2](torch.randn(4, 16, dtype=torch.float64)).sum().backward()
    model[0](torch.full((4, 12), float("nan"), dtype=torch.float64)).sum().backward()
    model[0].values.grad = None  # so that the optimizer leaves the values alone
    with pytest.raises(ValueError, match="x holds NaN or infinity"):
        trainer.step()
    assert patterns(model) == before


def test_bad_arguments():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dense = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="the model has no sparse layers"):
        Static(dense, torch.optim.SGD(dense.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got str"):
        Static("model", optimizer)
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, got str"):
        Static(model, "adam")
    with pytest.raises(ValueError, match="does not hold the values of layer '0'"):
        Static(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    with pytest.raises(TypeError, match="LBFGS mixes all weights"):
        Static(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="both a schedule and a growth"):
        SparseTrainer(model, optimizer, schedule=EVERY, growth=None)
    with pytest.raises(ValueError, match="both a schedule and a growth"):
        SparseTrainer(model, optimizer, schedule=None, growth=GradientGrowth())
    with pytest.raises(TypeError, match="initial_value must be a number or a function, got 'x'"):
        RigL(model, optimizer, total_steps=10, initial_value="x")
    twins = nn.Sequential(SparseLinear(4, 4), SparseLinear(4, 4))
    twins[1].values = twins[0].values
    with pytest.raises(ValueError, match="'0' and '1' share their values but not their pattern"):
        Static(twins, torch.optim.SGD(twins.parameters(), lr=0.1))


def test_update_without_backward_raises():
    layer = small_layer()
    trainer = RigL(layer, torch.optim.SGD(layer.parameters(), lr=0.1), schedule=EVERY)
    with pytest.raises(RuntimeError, match=r"call trainer\.step\(\) after loss\.backward\(\)"):
        trainer.step()
    layer.values.grad = torch.ones_like(layer.values)
    with pytest.raises(RuntimeError, match=r"set by hand or come from torch\.func are not seen"):
        trainer.step()


@pytest.mark.parametrize("returned", [0, 3])
@pytest.mark.parametrize("regrow", [False, True])
def test_growth_of_other_numbers_raises(regrow, returned):
    class Few(GradientGrowth):
        def choose(self, requests, step, ranks=None):
            return [flat[:returned] for flat in super().choose(requests, step)]

    model = make_model()
    trainer = SparseTrainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=EVERY, growth=Few(),
        regrow_dropped=regrow,
    )  # fmt: skip
    model(torch.randn(4, 12, dtype=torch.float64)).sum().backward()
    match = f"layer '0': the growth returned {returned} positions, .* were asked for"
    with pytest.raises(ValueError, match=match):
        trainer.step()


@pytest.mark.parametrize("budget", [LayerBudget, GlobalBudget, SoftBudget])
def test_schedule_with_a_fraction_of_blocks_raises(budget):
    class Half:
        def is_due(self, step):
            return True

        def drop_count(self, step, nnz):
            return nnz / 2

    layer = small_layer()
    trainer = SparseTrainer(
        layer, torch.optim.SGD(layer.parameters(), lr=0.1), schedule=Half(),
        growth=GradientGrowth(), budget=budget(),
    )  # fmt: skip
    with pytest.raises(TypeError, match="the schedule's drop_count must be an integer, got"):
        step_with_gradient(layer, trainer, GRADIENT)


def test_mismatched_states_raise():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = RigL(model, optimizer, total_steps=10, update_interval=2)
    trainer.steps = 4
    other = {
        "its algorithm is 'SET'": SET(model, optimizer, total_steps=10, update_interval=2),
        "its total_steps is 11, here it is 10": RigL(
            model, optimizer, total_steps=11, update_interval=2
        ),
        "its regrow_dropped is True": RigL(
            model, optimizer, total_steps=10, update_interval=2, regrow_dropped=True
        ),
        "its pooling is 'max', here it is 'sum'": RigL(
            model, optimizer, total_steps=10, update_interval=2, pooling="max"
        ),
        "its layers is": RigL(model[0], optimizer, total_steps=10, update_interval=2),
    }
    for message, saved in other.items():
        with pytest.raises(ValueError, match=message):
            trainer.load_state_dict(saved.state_dict())
        assert trainer.steps == 4
    for foreign in ({}, {"steps": 3}, None, [1]):
        with pytest.raises(ValueError, match="not the state of a trainer"):
            trainer.load_state_dict(foreign)


def test_update_uses_the_layers_that_got_the_gradient():
    """`requires_grad` changes between the steps of a schedule, as when layers take turns."""
    layers = [SparseLinear(8, 8, 0.4), SparseLinear(8, 8, 0.4)]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    trainer = RigL(nn.Sequential(*layers), optimizer, schedule=EVERY)
    for step in range(4):
        for k, layer in enumerate(layers):
            layer.requires_grad_(k == step % 2)
        optimizer.zero_grad()
        layers[1](layers[0](torch.randn(5, 8))).square().sum().backward()
        assert list(trainer.step()) == [str(step % 2)]


def test_other_gradients_after_backward_do_not_count():
    layer, x, gradient = SparseLinear(6, 6, 0.3), torch.eye(6), torch.randn(6, 6)
    other = copy.deepcopy(layer)
    for each, has_diagnosis in ((layer, False), (other, True)):
        trainer = RigL(each, torch.optim.SGD(each.parameters(), lr=0.1), schedule=EVERY)
        each(x).backward(gradient)
        if has_diagnosis:
            torch.autograd.grad(each(x).pow(4).sum(), list(each.parameters()))
        trainer.step()
    assert layer.pattern == other.pattern
