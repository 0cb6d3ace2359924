"""A failing update changes nothing, names the layer, and can be retried."""

import copy

import pytest
import torch
from tests.training.states import ALGORITHMS, backward, make, same, state_of

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.training import ConstantSchedule, RigL, Static

EVERY = ConstantSchedule(total_steps=1000, update_interval=1, drop_fraction=0.5)


def train_to_an_update(name, **options):
    """Train for two steps and compute the gradients of the third, which is due for an update."""
    model, trainer = make(name, **options)
    for _ in range(2):
        backward(model, trainer)
        trainer.step()
    backward(model, trainer)
    return model, trainer


@pytest.mark.parametrize("name", ALGORITHMS)
def test_optimizer_state_of_unknown_shape_changes_nothing(name):
    """An error if kept values move; otherwise a warning, which the tests turn into an error."""
    model, trainer = train_to_an_update(name)
    assert trainer._is_due(3)
    other = copy.deepcopy((model, trainer))
    # The copy has its gradients by its own backward pass.
    for m, t in ((model, trainer), other):
        backward(m, t)
        t.before_optimizer_step()
        t.optimizer.step()
    state = trainer.optimizer.state[model[2].values]
    state["sketch"] = torch.zeros(2)
    before = state_of(model, trainer)
    pairs = {n: len(p) for n, p in trainer._captures.items()}
    with pytest.raises((ValueError, RuntimeError), match=r"layer '2': .*'sketch' of shape"):
        trainer.after_optimizer_step()
    assert same(state_of(model, trainer), before)
    assert {n: len(p) for n, p in trainer._captures.items()} == pairs
    del state["sketch"]
    # A retry gives the same result as if nothing had failed.
    assert trainer.after_optimizer_step() is not None
    assert other[1].after_optimizer_step() is not None
    assert same(state_of(model, trainer), state_of(*other))


@pytest.mark.parametrize("name", ["rigl", "granet", "topkast"])
def test_initial_value_that_raises_changes_nothing(name):
    broken = False

    def start(layer, rewiring):
        if broken and layer.in_features == 16:
            raise OSError("no room")
        shape = [len(rewiring.grown), *layer.values.shape[1:]]
        return torch.full(shape, 0.25)

    model, trainer = train_to_an_update(name, initial_value=start)
    trainer.before_optimizer_step()
    trainer.optimizer.step()
    broken = True
    before = state_of(model, trainer)
    with pytest.raises(RuntimeError, match="layer '2': OSError: no room"):
        trainer.after_optimizer_step()
    assert same(state_of(model, trainer), before)
    broken = False
    assert "2" in trainer.after_optimizer_step()
    assert trainer.steps == 3


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (
            lambda layer, rewiring: torch.zeros(1, 7),
            r"layer '0': .* a tensor \[\d+\], got \[1, 7\]",
        ),
        (lambda layer, rewiring: float("nan"), "layer '0': .* finite numbers, got nan"),
        (lambda layer, rewiring: "much", "layer '0': .* a number or a tensor, got 'much'"),
        (lambda layer, rewiring: torch.full((len(rewiring.grown),), torch.inf), "NaN or infinity"),
        (lambda layer, rewiring: torch.ones(len(rewiring.grown)).bool(), "real numbers, got torch"),
    ],
)
def test_bad_initial_values_change_nothing(start, message):
    model, trainer = train_to_an_update("rigl", initial_value=0.0)
    trainer.initial_value = start
    trainer.before_optimizer_step()
    trainer.optimizer.step()
    before = state_of(model, trainer)
    with pytest.raises((TypeError, ValueError), match=message):
        trainer.after_optimizer_step()
    assert same(state_of(model, trainer), before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_nonfinite_gradient_raises_before_the_optimizer_step(name, bad):
    model, trainer = train_to_an_update(name)
    with torch.no_grad():
        model[2].values.grad.view(-1)[1] = bad
    before = state_of(model, trainer)
    with pytest.raises(ValueError, match="layer '2': the gradient of its weights holds NaN or inf"):
        trainer.step()
    assert same(state_of(model, trainer), before)
    backward(model, trainer)
    assert trainer.step() is not None


@pytest.mark.parametrize("name", ALGORITHMS)
def test_nan_weights_raise(name):
    model, trainer = train_to_an_update(name)
    trainer.before_optimizer_step()
    trainer.optimizer.step()
    with torch.no_grad():
        model[2].values.view(-1)[0] = torch.nan
    before = state_of(model, trainer)
    with pytest.raises(ValueError, match="layer '2': drop scores hold NaN"):
        trainer.after_optimizer_step()
    assert same(state_of(model, trainer), before)


def test_raising_hooks_do_not_stop_others():
    model, trainer = train_to_an_update("rigl")
    heard = []

    def full(step, rewirings):
        heard.append(("full", trainer.updates))
        raise OSError("the disk is full")

    trainer.on_update += [full, lambda step, r: heard.append((step, sorted(r))), full]
    patterns = [model[i].pattern for i in (0, 2)]
    updates = trainer.updates
    with pytest.raises(OSError, match="the disk is full"):
        trainer.step()
    assert heard == [("full", updates + 1), (3, ["0", "2"]), ("full", updates + 1)]
    assert (trainer.steps, trainer.updates) == (3, updates + 1)
    assert all(model[i].pattern != p for i, p in zip((0, 2), patterns, strict=True))
    backward(model, trainer)  # and it goes on
    trainer.on_update.clear()
    assert trainer.step() is not None


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_copies_train_identically(name, way):
    import pickle

    model, trainer = make(name)
    backward(model, trainer)
    trainer.step()
    everything = model, trainer.optimizer, trainer
    if way == "deepcopy":
        other, optimizer, twin = copy.deepcopy(everything)
    else:
        other, optimizer, twin = pickle.loads(pickle.dumps(everything))
    assert twin.optimizer is optimizer
    for m, t in ((model, trainer), (other, twin)):
        for _ in range(4):
            backward(m, t)
            t.step()
        assert t.updates > 1
    assert same(state_of(model, trainer), state_of(other, twin))


def test_layer_with_two_trainers_raises():
    layer = SparseLinear(8, 8, density=0.3)
    momentum = [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for _ in range(2)]
    first = RigL(layer, momentum[0], schedule=EVERY)
    second = Static(layer, momentum[1])
    layer(torch.randn(4, 8)).sum().backward()
    assert first.step() is not None
    second.step()
    layer(torch.randn(4, 8)).sum().backward()
    before, weights = layer.pattern, layer.values.detach().clone()
    with pytest.raises(RuntimeError, match="layer '' is also trained by another trainer"):
        first.step()
    assert layer.pattern is before
    assert torch.equal(layer.values, weights)
    # One after the other is no matter, though the earlier one is still there.
    third = RigL(layer, momentum[0], schedule=EVERY)
    layer(torch.randn(4, 8)).sum().backward()
    assert third.step() is not None
    del second, first


@pytest.mark.parametrize("window", [2**31, 2**40, None])
def test_long_schedules_start_immediately(window):
    layer = SparseLinear(8, 8, density=0.3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for total in (2**31, 2**40):
        trainer = ds.SNFS(layer, optimizer, total_steps=total, update_interval=2**30, window=window)
        layer(torch.randn(4, 8)).sum().backward()
        assert trainer.step() is None
    trainer = ds.SNFS(layer, optimizer, total_steps=2**40, update_interval=2, window=window)
    for _ in range(2):
        layer(torch.randn(4, 8)).sum().backward()
        updated = trainer.step()
    assert updated is not None


def damaged_states(name, state):
    """Yield (key, value) replacements that make the state invalid."""
    for key in ("steps", "updates"):
        for value in (-1, "3", 2.5, float("nan"), None, True, torch.tensor([1, 2])):
            yield key, value
    if state["growth_state"]:
        for value in ({}, None, {"seed": "x"}, {"seed": torch.zeros(3)}, {"seed": True}):
            yield "growth_state", value
    for key, part in state["budget_state"].items():
        for value in ({}, None, {key: {}}, {key: {**part, "0": -1}}, {key: {**part, "0": "x"}}):
            yield "budget_state", value
    for key, part in state["history_state"].items():
        foreign = {"x": next(iter(part.values()))}
        for value in (None, {}, {key: None}, {key: {"0": 3}}, {key: foreign},
                      {key: {"0": torch.zeros(2, 3)}}, {key: {"0": [[(1, 2)]]}}):  # fmt: skip
            yield "history_state", value
    own = state["own_state"]
    for value in (None, {"x": torch.zeros(2)}, {**own, "0": torch.zeros(5)}) if own else ():
        yield "own_state", value
    if own:
        yield "own_state", {**own, "0": own["0"][:-1] if name == "deepr" else own["0"] + 10**6}
        yield "own_state", {**own, "0": "x"}
    yield "layers", torch.tensor([1, 2])


@pytest.mark.parametrize("name", [*ALGORITHMS, "snfs-dense"])
def test_damaged_state_changes_nothing(name):
    model, trainer = train_to_an_update(name)
    trainer.step()
    good = copy.deepcopy(trainer.state_dict())
    before = state_of(model, trainer)
    tried = 0
    for key, value in damaged_states(name, good):
        with pytest.raises(ValueError, match=r"state|layer|budget|history|signs"):
            trainer.load_state_dict({**copy.deepcopy(good), key: value})
        assert same(state_of(model, trainer), before), (key, value)
        tried += 1
    assert tried >= 15
    trainer.load_state_dict(good)
    assert same(state_of(model, trainer), before)


def test_failing_part_of_a_state_rolls_back_the_others(monkeypatch):
    model, trainer = train_to_an_update("deepr")
    good = copy.deepcopy(trainer.state_dict())
    trainer.step()
    before = state_of(model, trainer)

    def fail(state):
        raise ValueError("not this one")

    monkeypatch.setattr(trainer.history, "load_state_dict", fail)
    with pytest.raises(ValueError, match=r"not this one|signs"):
        trainer.load_state_dict(good)
    assert same(state_of(model, trainer), before)
