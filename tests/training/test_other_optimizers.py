"""Optimizers that wrap others, and optimizers without torch's hooks."""

import warnings

import pytest
import torch
from small_trainings import EVERY, assert_same, loss_of, reference, small

import dynsparse as ds
from dynsparse.training import ConstantSchedule


class EveryNthStep(torch.optim.Optimizer):
    """A wrapper without hooks that steps the wrapped optimizer every n-th call."""

    def __init__(self, optimizer, every):
        self.optimizer, self.every, self.calls = optimizer, every, 0

    def step(self):
        self.calls += 1
        if self.calls % self.every == 0:
            self.optimizer.step()


class WithoutHooks(torch.optim.SGD):
    """An optimizer that does not call torch's constructor."""

    def __init__(self, parameters):
        made = torch.optim.SGD(parameters, lr=0.05)
        self.defaults, self.state, self.param_groups = made.defaults, made.state, made.param_groups

    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=group["lr"])


def test_wrapped_optimizer():
    model, optimizer, _ = small()
    around = EveryNthStep(optimizer, 2)
    trainer = ds.RigL(model, around, schedule=EVERY)
    made = []
    for step in range(4):
        loss_of(model, step).backward()
        made.append(trainer.step())
    assert [one is None for one in made] == [True, False, True, False]
    assert (trainer.steps, trainer.updates) == (2, 2)
    assert trainer.optimizer is optimizer


def test_optimizer_without_hooks():
    expected = reference()
    model, _, _ = small()
    trainer = ds.RigL(
        model, WithoutHooks(model.parameters()), schedule=ConstantSchedule(100, 3, 0.4)
    )
    for step in range(7):
        model.zero_grad()
        loss_of(model, step).backward()
        trainer.step()
    assert_same((model, None, trainer), expected)


def test_accelerate_counts_steps_taken():
    accelerate = pytest.importorskip("accelerate")

    def run(prepare_first, by_trainer=False):
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer, trainer = small(schedule=EVERY)
        bare = trainer
        if prepare_first:
            model, optimizer = accelerator.prepare(model, optimizer)
            trainer = ds.RigL(model, optimizer, schedule=EVERY)
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
        try:
            for step in range(8):
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, step))
                    trainer.step() if by_trainer else optimizer.step()
                    optimizer.zero_grad()
        finally:
            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()
        assert bare is trainer or bare.steps == 0
        return model, trainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Accelerate's own
        runs = [run(True), run(False), run(True, by_trainer=True)]
    for model, trainer in runs:
        assert (trainer.steps, trainer.updates) == (4, 4)
        assert all(
            torch.equal(tensor, runs[0][0].state_dict()[name])
            for name, tensor in model.state_dict().items()
        )
    with pytest.raises(RuntimeError, match="inside accumulate\\(\\) of Accelerate: call step"):
        run(False, by_trainer=True)
