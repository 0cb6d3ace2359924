"""Optimizers that wrap others, and optimizers without torch's hooks."""

import warnings
from collections import defaultdict

import pytest
import torch
from small_trainings import EVERY, assert_same, loss_of, reference, small

import dynsparse as ds
from dynsparse.training import ConstantSchedule
from dynsparse.training.optimizer_state import states_of


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


class Lookahead(torch.optim.Optimizer):
    """The first Lookahead for torch: no call of torch's constructor, and slow weights of its own.

    https://github.com/alphadl/lookahead.pytorch
    """

    def __init__(self, optimizer, k=2, alpha=0.5):
        self.optimizer, self.k, self.alpha, self.calls = optimizer, k, alpha, 0
        self.param_groups, self.state = optimizer.param_groups, defaultdict(dict)

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.calls += 1
        if self.calls % self.k == 1:
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        slow = self.state[p].setdefault("slow_param", p.clone())
                        p.copy_(slow.lerp_(p, self.alpha))
        return loss


class Both(torch.optim.Optimizer):
    """Optimizers in a container, of which each trains a part of the weights."""

    def __init__(self, optimizers, has_hooks):
        self.optimizers = optimizers
        held = optimizers.values() if isinstance(optimizers, dict) else optimizers
        groups = [group for one in held for group in one.param_groups]
        if has_hooks:
            super().__init__(groups, {})
        else:
            self.param_groups, self.state = groups, {}

    def step(self):
        held = self.optimizers
        for one in held.values() if isinstance(held, dict) else held:
            one.step()


def named(optimizers):
    return dict(zip("ab", optimizers, strict=True))


def grown_state(trainer):
    """Collect (optimizer or None for weights, key, entries of grown weights) after each update."""
    found = []

    def look(step, rewirings):
        for name, rewiring in rewirings.items():
            values = trainer.layers[name].values
            found.append((None, "weights", values.detach()[rewiring.grown].clone()))
            for holder, state in states_of(trainer.optimizer, values):
                found.extend(
                    (holder, key, tensor[rewiring.grown].clone())
                    for key, tensor in state.items()
                    if tensor.shape == values.shape
                )

    trainer.on_update.append(look)
    return found


@pytest.mark.parametrize("take", ["trainer", "optimizer", "closure"])
@pytest.mark.parametrize("initial_value", [0.0, 0.5])
def test_lookahead_without_constructor(take, initial_value):
    model = small()[0]
    optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.05))
    trainer = ds.RigL(model, optimizer, schedule=EVERY, initial_value=initial_value)
    assert trainer.optimizer is optimizer
    found = grown_state(trainer)
    for step in range(4):
        model.zero_grad()
        if take == "closure":
            assert optimizer.step(lambda step=step: backward(model, step)) is not None
            continue
        backward(model, step)
        (trainer if take == "trainer" else optimizer).step()
    assert (trainer.steps, trainer.updates) == (4, 4)
    assert {key for _, key, _ in found} == {"weights", "slow_param", "exp_avg", "exp_avg_sq"}
    for _, key, grown in found:
        assert len(grown)
        assert (grown == (initial_value if key in ("weights", "slow_param") else 0)).all(), key


def backward(model, step):
    loss = loss_of(model, step)
    loss.backward()
    return loss


def test_other_instances_of_a_followed_class_work():
    model = small()[0]
    first, second = (Lookahead(torch.optim.SGD(model.parameters(), lr=0.1)) for _ in range(2))
    trainer = ds.RigL(model, first, schedule=EVERY)
    trainer.stop()
    backward(model, 0)
    second.step()
    assert trainer.steps == 0
    trainer.step()
    model.zero_grad()
    backward(model, 1)
    first.step()
    assert trainer.steps == 2


@pytest.mark.parametrize("first", ["trainer", "schedule"])
def test_scheduler_of_a_followed_wrapper(first):
    model = small()[0]
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    if first == "trainer":
        trainer = ds.RigL(model, optimizer, schedule=EVERY)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if first == "schedule":
        trainer = ds.RigL(model, optimizer, schedule=EVERY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2):
            model.zero_grad()
            backward(model, step)
            optimizer.step()
            schedule.step()
    assert trainer.steps == 2


class Unknown:
    """A wrapper with state of its own that is no optimizer of torch's."""

    def __init__(self, optimizer):
        self.optimizer, self.state = optimizer, {"slow": [torch.zeros(2)]}


def make_private(optimizer):
    """An optimizer around another one, whose class and step are in a module of Opacus's name."""
    names = {"__name__": "opacus.optimizers.optimizer", "Optimizer": torch.optim.Optimizer}
    code = """
class DPOptimizer(Optimizer):
    def __init__(self, original):
        self.original_optimizer = original
        self.param_groups, self.state = original.param_groups, original.state
        self.defaults = original.defaults

    def step(self):
        self.original_optimizer.step()
"""
    exec(code, names)
    return names["DPOptimizer"](optimizer)


def test_growth_by_gradient_with_private_steps_raises():
    model, optimizer, trainer = small()
    private = make_private(optimizer)
    for wrapped in (private, EveryNthStep(private, 1)):
        with pytest.raises(ValueError, match="growth by gradient is not private"):
            ds.RigL(model, wrapped, total_steps=20)
    # The optimizer may become private after the trainer is made.
    before = model[0].pattern
    for step in range(3):
        loss_of(model, step).backward()
        if step < 2:
            private.step()
    with pytest.raises(ValueError, match="growth by gradient is not private"):
        private.step()
    assert (trainer.steps, model[0].pattern) == (2, before)
    trainer.stop()
    random = ds.SET(model, private, total_steps=20, update_interval=2)
    for step in range(4):
        loss_of(model, step).backward()
        private.step()
    assert random.updates == 2


def test_wrapper_with_state_but_without_hooks_raises():
    model, inner, _ = small()
    with pytest.raises(TypeError, match=r"got \S+\.Unknown, a wrapper with state of its own"):
        ds.RigL(model, Unknown(inner), schedule=EVERY)


class OptimWrapper:
    """As fastai's, which is no optimizer of torch's either."""

    def __init__(self, optimizer):
        self.opt = optimizer


def test_optimizer_of_fastai_raises():
    model, optimizer, _ = small()
    with pytest.raises(TypeError, match=r"\.OptimWrapper: pass the optimizer that it holds, its"):
        ds.RigL(model, OptimWrapper(optimizer), total_steps=10)


@pytest.mark.parametrize("container", [list, tuple, named])
@pytest.mark.parametrize("take", ["trainer", "optimizer"])
@pytest.mark.parametrize("has_hooks", [True, False])
def test_optimizers_in_a_container(container, take, has_hooks):
    model = small()[0]
    adams = [torch.optim.Adam(model[i].parameters(), lr=0.05) for i in (0, 2)]
    optimizer = Both(container(adams), has_hooks)
    trainer = ds.RigL(model, optimizer, schedule=EVERY)
    found = grown_state(trainer)
    for step in range(3):
        model.zero_grad()
        backward(model, step)
        (trainer if take == "trainer" else optimizer).step()
    assert (trainer.steps, trainer.updates) == (3, 3)
    of_state = [grown for holder, _, grown in found if holder is not None]
    assert len(of_state) == 3 * 2 * 2
    assert all(len(grown) and (grown == 0).all() for grown in of_state)


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


@pytest.mark.parametrize("algorithm", [ds.RigL, ds.SET])
def test_optimizer_of_copies_raises(algorithm):
    """As DeepSpeed's ZeRO makes it: one flat copy of all weights, and no gradients left."""
    model = small()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = algorithm(model, optimizer, schedule=EVERY)
    loss_of(model, 0).backward()
    parameters = list(model.parameters())
    flat = torch.nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
    flat.grad = torch.cat([p.grad.flatten() for p in parameters])
    optimizer.param_groups[0]["params"] = [flat]
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"layer '0': its values are not those .* DeepSpeed"):
        optimizer.step()
    assert trainer.updates == 0


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
