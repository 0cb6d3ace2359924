"""The repr of trainers, and warnings about likely mistakes."""

import gc
import sys
import threading
import warnings

import pytest
import torch
from small_trainings import loss_of, small

import dynsparse as ds
from dynsparse.training.steps import OptimizerSteps


def test_unreferenced_trainer_warns():
    model, optimizer, trainer = small()
    del trainer
    gc.collect()
    loss_of(model, 0).backward()
    with pytest.warns(UserWarning, match="trainer of this optimizer is gone before its first step"):
        optimizer.step()
    optimizer.step()
    model, optimizer, trainer = small()
    loss_of(model, 0).backward()
    trainer.step()
    del trainer
    optimizer.step()  # it has been used: a warning would be an error


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def test_optimizer_without_trainer_warns():
    model, optimizer, trainer = small()
    train(model, optimizer, 1)
    other = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match=r"another optimizer \(AdamW\) .* make a new trainer") as w:
        train(model, other, 20)
    assert len(w) == 1
    assert trainer.steps == 1
    newer = ds.RigL(model, other, total_steps=100, update_interval=4)
    train(model, other, 20)
    assert newer.updates == 5


def test_optimizers_that_do_not_warn():
    model, optimizer, trainer = small()
    head = torch.nn.Linear(2, 2)
    unrelated = torch.optim.SGD(head.parameters(), lr=0.1)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        unrelated.step()
        train(model, other, 2)  # between the trainer's steps
        train(model, optimizer, 1)
    trainer.stop()
    train(model, other, 20)
    ended = ds.SET(model, optimizer, total_steps=4, update_interval=1)
    train(model, optimizer, 4)
    assert ended.updates
    train(model, other, 20)  # fine-tunes the final patterns


class Inner(torch.optim.Optimizer):
    """Each of its steps takes many of an optimizer that it makes for them."""

    def step(self, closure=None):
        inner = torch.optim.SGD(self.param_groups, lr=0.1)
        for _ in range(20):
            inner.step()


def test_steps_inside_a_step_do_not_warn():
    model = small()[0]
    optimizer = Inner(model.parameters(), {})
    trainer = ds.SET(model, optimizer, total_steps=100, update_interval=4)
    train(model, optimizer, 3)
    assert trainer.steps == 3


def test_trainers_start_in_other_threads():
    """While a step looks through the trainers there are."""
    _, optimizer, trainer = small()
    unrelated = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    several = [OptimizerSteps(optimizer, trainer) for _ in range(300)]
    ended = threading.Event()

    def restart():
        while not ended.is_set():
            for steps in several:
                steps.stop()
                steps.start()

    interval = sys.getswitchinterval()
    other = threading.Thread(target=restart)
    try:
        sys.setswitchinterval(1e-6)
        other.start()
        for _ in range(400):
            unrelated.step()
    finally:
        ended.set()
        other.join()
        sys.setswitchinterval(interval)


def test_schedule_without_updates_warns():
    model, optimizer, _ = small()
    with pytest.warns(UserWarning, match=r"the pattern never changes: CosineSchedule\(total_ste"):
        ds.RigL(model, optimizer, total_steps=100, update_interval=100)
    with pytest.warns(UserWarning, match="lower update_interval, raise total_steps or drop_fr"):
        ds.SET(model, optimizer, total_steps=100, drop_fraction=0.0)


@pytest.mark.parametrize("kind", [ds.RigL, ds.SET])
def test_frozen_values_warn(kind):
    model, optimizer, trainer = small()
    trainer.stop()
    for layer in (model[0], model[2]):
        layer.values.requires_grad_(False)
    with pytest.warns(UserWarning, match="none of the sparse layers' values require a gradient"):
        trainer = kind(model, optimizer, total_steps=20, update_interval=2)
    assert "next_update=none" in repr(trainer)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, step).backward()  # of the biases
        optimizer.step()
        if step == 2:
            assert trainer.updates == 0
            model.requires_grad_()
            assert "next_update=after step 4" in repr(trainer)
    assert trainer.updates == 1
    ds.Static(model.requires_grad_(False), optimizer)  # has no updates, so nothing to warn of


@pytest.mark.parametrize("steps", [1, 5, 10, 100, 999, 1000, 5000])
@pytest.mark.parametrize("kind", [ds.RigL, ds.TopKAST, ds.GMP, ds.GraNet])
def test_default_interval_of_short_trainings(kind, steps):
    model, optimizer, _ = small()
    final = {"final_density": 0.1} if kind in (ds.GMP, ds.GraNet) else {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = kind(model, optimizer, total_steps=steps, **final)
    assert trainer.schedule.update_interval == min(100, max(1, steps // 10))
    due = [step for step in range(1, steps + 1) if trainer.schedule.is_due(step)]
    assert bool(due) == (not said)
    assert len(due) >= 7 or steps < 10


def test_repr():
    model, optimizer, trainer = small(schedule=None, total_steps=40, update_interval=10)
    text = "RigL(layers=2, density=0.3281, steps=0 of 40, updates=0, next_update=after step 10)"
    assert repr(trainer) == text
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    assert "steps=10 of 40, updates=1, next_update=after step 20" in repr(trainer)
    assert repr(ds.Static(model, optimizer)).endswith("steps=0, updates=0, next_update=none)")

    class Own:
        def is_due(self, step):
            return step == 7

        def drop_count(self, step, nnz):
            return 1

    assert "next_update=as Own says" in repr(ds.SET(model, optimizer, schedule=Own()))


def test_training_past_its_schedule_warns_once():
    model, optimizer, trainer = small(schedule=None, total_steps=4, update_interval=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(7):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            assert len(said) == (step >= 4)
    assert "step 5 of a schedule for total_steps=4" in str(said[0].message)
    assert trainer.steps == 7
    model, optimizer, trainer = small(schedule=None, total_steps=4, update_interval=2)
    trainer.warns_at_end = False
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()  # a warning would be an error


def test_zero_grad_before_an_update_raises():
    model, optimizer, trainer = small(schedule=None, total_steps=40, update_interval=2)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step == 1:
            optimizer.zero_grad()
            with pytest.raises(RuntimeError, match=r"zero_grad\(\) after the step or before"):
                trainer.step()
            loss_of(model, step).backward()
        trainer.step()
    assert (trainer.steps, trainer.updates) == (2, 1)
