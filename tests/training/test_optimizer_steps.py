"""The trainer counts each optimizer step once, however it is taken."""

import copy
import pickle

import pytest
import torch
from small_trainings import EVERY, assert_same, loss_of, reference, small
from tests.training.states import ALGORITHMS, backward, make, same, state_of
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.training import scaled_step


@pytest.mark.parametrize("name", ALGORITHMS)
def test_optimizer_step_equals_trainer_step(name):
    one, other = make(name), make(name)
    for step in range(6):
        backward(*one)
        backward(*other)
        one[1].step()
        other[1].optimizer.step()
        assert same(state_of(*one), state_of(*other)), step
    assert one[1].steps == other[1].steps == 6


def step_with_closure(model, optimizer, trainer, step):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None


def step_with_named_closure(model, optimizer, trainer, step):
    def closure():
        optimizer.zero_grad()
        loss_of(model, step).backward()

    optimizer.step(closure=closure)


def step_with_scaler(model, optimizer, trainer, step):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # a power of two: the same bits
    optimizer.zero_grad()
    scaler.scale(loss_of(model, step)).backward()
    scaler.step(optimizer)
    scaler.update()


def step_in_two_parts(model, optimizer, trainer, step):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    trainer.before_optimizer_step()
    optimizer.step()
    trainer.after_optimizer_step()


def step_with_micro_batches(model, optimizer, trainer, step):
    """Accumulate the gradients of two micro-batches."""
    optimizer.zero_grad()
    (loss_of(model, step) / 2).backward()
    (loss_of(model, step) / 2).backward()
    optimizer.step()


@pytest.mark.parametrize(
    "take",
    [
        step_with_closure,
        step_with_named_closure,
        step_with_scaler,
        step_in_two_parts,
        step_with_micro_batches,
    ],
)
def test_equivalent_ways_to_step(take):
    expected, parts = reference(), small()
    for step in range(7):
        take(*parts, step)
    assert_same(parts, expected)
    assert parts[2].updates == 2


class Scheduled(torch.optim.Adam):
    """Calls the step of its base class, as many custom optimizers do."""

    def step(self, closure=None):
        return super().step(closure)


def test_nested_step_counts_once():
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # after which torch tells of its steps, too
    expected, parts = reference(torch.optim.Adam), small(Scheduled)
    for step in range(7):
        parts[1].zero_grad()
        loss_of(parts[0], step).backward()
        parts[1].step()
    assert_same(parts, expected)


class Failing(Scheduled):
    broken = False

    def step(self, closure=None):
        if self.broken:
            raise OSError("the machine is on fire")
        return super().step(closure)


def test_step_after_a_failed_optimizer_step():
    expected, parts = reference(torch.optim.Adam), small(Failing)
    for step in range(7):
        parts[1].zero_grad()
        loss_of(parts[0], step).backward()
        if step in (2, 4):
            parts[1].broken = True
            with pytest.raises(OSError, match="on fire"):
                parts[1].step()
            parts[1].broken = False
        parts[1].step()
    assert_same(parts, expected)


def test_learning_rate_scheduler():
    model, optimizer, trainer = small()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        scheduler.step()
    assert (trainer.steps, trainer.updates) == (3, 1)


@pytest.mark.parametrize("first", ["trainer", "optimizer"])
def test_stepping_twice_raises(first):
    model, optimizer, trainer = small(schedule=EVERY)
    takers = [trainer.step, optimizer.step]
    names = ["trainer.step()", "optimizer.step()"]
    if first == "optimizer":
        takers.reverse(), names.reverse()
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        takers[0]()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RuntimeError) as error:
            takers[1]()
        assert str(error.value) == (
            f"{names[1]} would step a second time with a gradient that {names[0]} has stepped "
            "with: the trainer follows the optimizer, so call one of them after each backward pass"
        )
        assert (trainer.steps, trainer.updates) == (step + 1, step + 1)
        assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    # Another gradient may come by another way, whether or not the last was set to zero.
    loss_of(model, 5).backward()
    takers[1]()
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, 5).backward()
    takers[0]()
    assert trainer.steps == 4


def test_after_optimizer_step_twice_raises():
    model, optimizer, trainer = small()
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"after_optimizer_step\(\) would step a second time"):
        trainer.after_optimizer_step()
    assert trainer.steps == 1
    trainer.optimizer.zero_grad()
    loss_of(model, 1).backward()
    trainer.before_optimizer_step()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"expected after_optimizer_step\(\) behind the opt"):
        trainer.before_optimizer_step()
    trainer.after_optimizer_step()
    assert trainer.steps == 2


def test_update_that_failed_in_the_optimizer_step_can_be_retried():
    model, optimizer, trainer = small(schedule=EVERY)
    broken = True

    def start(layer, rewiring):
        if broken:
            raise OSError("no room")
        return 0.0

    trainer.initial_value = start
    loss_of(model, 0).backward()
    pattern = model[0].pattern
    with pytest.raises(RuntimeError, match="layer '0': OSError: no room"):
        optimizer.step()
    assert (trainer.steps, model[0].pattern) == (0, pattern)
    broken = False
    assert set(trainer.after_optimizer_step()) == {"0", "2"}
    assert trainer.steps == 1


@pytest.mark.parametrize("take", ["trainer", "optimizer", "two parts"])
def test_step_counts_once_if_a_function_of_on_update_fails(take):
    model, optimizer, trainer = small(schedule=EVERY)

    def fail(step, rewirings):
        raise OSError("no room")

    trainer.on_update.append(fail)
    loss_of(model, 0).backward()
    if take == "two parts":
        trainer.before_optimizer_step()
        optimizer.step()
    with pytest.raises(OSError, match="no room"):
        {"trainer": trainer.step, "optimizer": optimizer.step}.get(
            take, trainer.after_optimizer_step
        )()
    assert (trainer.steps, trainer.updates) == (1, 1)
    trainer.on_update.clear()
    if take != "two parts":
        with pytest.raises(
            RuntimeError, match=r"after_optimizer_step\(\) would step a second time"
        ):
            trainer.after_optimizer_step()
        assert trainer.steps == 1
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.step()
    assert (trainer.steps, trainer.updates) == (2, 2)


def test_last_trainer_of_an_optimizer_is_active():
    model, optimizer, first = small(schedule=EVERY)
    second = ds.Static(model, optimizer)
    loss_of(model, 0).backward()
    optimizer.step()
    assert (first.steps, second.steps) == (0, 1)
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    assert first.step() is not None  # who is asked by name leads from then on
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    optimizer.step()
    assert (first.steps, second.steps) == (2, 1)
    first.stop()
    optimizer.step()
    assert (first.steps, second.steps) == (2, 1)


def test_trainers_of_several_models_share_an_optimizer():
    models = [SparseLinear(8, 8, density=0.3) for _ in range(2)]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    trainers = [ds.RigL(model, optimizer, schedule=EVERY) for model in models]
    for model in models:
        model(torch.randn(4, 8)).sum().backward()
    trainers[0].step()
    assert [t.updates for t in trainers] == [1, 1]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda parts: pickle.loads(pickle.dumps(parts))])
def test_copies_follow_their_own_optimizer(way):
    parts = small()
    model, optimizer, trainer = way(parts)
    loss_of(model, 0).backward()
    optimizer.step()
    assert (trainer.steps, parts[2].steps) == (1, 0)


def test_loading_a_checkpoint_keeps_hooks(tmp_path):
    from dynsparse.training import load_checkpoint, save_checkpoint

    model, optimizer, trainer = small()
    heard = []
    optimizer.register_step_post_hook(lambda *_: heard.append(1))
    parts = {"model": model, "optimizer": optimizer, "trainer": trainer}
    save_checkpoint(tmp_path / "state", **parts)
    load_checkpoint(tmp_path / "state", **parts)
    loss_of(model, 0).backward()
    optimizer.step()
    assert (trainer.steps, heard) == (1, [1])


def test_scaled_step_equals_scaler_step():
    expected = small()
    for step in range(7):
        step_with_scaler(*expected, step)
    model, optimizer, trainer = parts = small()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(7):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaled_step(trainer, scaler)
    assert_same(parts, expected)
