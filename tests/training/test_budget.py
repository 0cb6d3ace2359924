"""Budgets: number of dropped and grown blocks, compared with hand-computed cases."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dynsparse as ds
from dynsparse import SparsePattern
from dynsparse.nn import SparseLinear
from dynsparse.training import (
    Budget,
    ConstantSchedule,
    ElasticSchedule,
    GlobalBudget,
    GradualBudget,
    GradualSchedule,
    LastStep,
    LayerBudget,
    MomentumBudget,
    SoftBudget,
)
from dynsparse.training.budgets import Survey, apportion
from dynsparse.training.drop import count_lowest


def survey(patterns, scores=None, *, schedule=None, step=10, regrow_dropped=False, history=None):
    scores = {} if scores is None else {n: torch.tensor(s) for n, s in scores.items()}
    return Survey(
        step=step,
        schedule=schedule or ConstantSchedule(100, 10, 0.5),
        patterns=patterns,
        scores=scores.__getitem__,
        history=history or LastStep(),
        regrow_dropped=regrow_dropped,
    )


def pattern(nnz, shape=(2, 5), block_size=1):
    return SparsePattern.from_flat(torch.arange(nnz), shape=shape, block_size=block_size)


TWO = {"a": pattern(4), "b": pattern(6)}


def test_layer_budget():
    found = LayerBudget().counts(survey(TWO))
    assert found == {"a": (2, 2), "b": (3, 3)}
    nearly = {"a": pattern(9), "b": pattern(10)}  # one position is free, and none
    assert LayerBudget().counts(survey(nearly)) == {"a": (1, 1), "b": (0, 0)}
    found = LayerBudget().counts(survey(nearly, regrow_dropped=True))
    assert found == {"a": (4, 4), "b": (5, 5)}


def test_global_budget_drops_the_lowest_scores():
    scores = {"a": [9.0, 1.0, 8.0, 7.0], "b": [2.0, 3.0, 4.0, 5.0, 6.0, 6.0]}
    # Half of ten: 1 of a; 2, 3, 4, 5 of b, where four positions are free.
    assert GlobalBudget().counts(survey(TWO, scores)) == {"a": (1, 1), "b": (4, 4)}
    scores = {"a": [9.0, 9.0, 9.0, 9.0], "b": [0.0] * 6}
    # b can lose no more than its four free positions, so the fifth is of a.
    assert GlobalBudget().counts(survey(TWO, scores)) == {"a": (1, 1), "b": (4, 4)}
    found = GlobalBudget().counts(survey(TWO, scores, regrow_dropped=True))
    assert found == {"a": (0, 0), "b": (5, 5)}


def test_lowest_of_all_with_ties():
    scores = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0, 0.0])]
    assert count_lowest(scores, 0, [2, 3]) == [0, 0]
    assert count_lowest(scores, 2, [2, 3]) == [1, 1]
    assert count_lowest(scores, 4, [2, 2]) == [2, 2]
    assert count_lowest(scores, 5, [2, 3]) == [2, 3]
    with pytest.raises(ValueError, match="cannot select 5 of 4 scores"):
        count_lowest(scores, 5, [2, 2])
    with pytest.raises(ValueError, match="drop scores hold NaN"):
        count_lowest([torch.tensor([float("nan")])], 1, [1])


def test_compared_scores_stay_on_device(monkeypatch):
    def fetch(self, *args, **kwargs):
        raise AssertionError("scores came to the CPU")

    monkeypatch.setattr(torch.Tensor, "cpu", fetch)
    scores = [torch.tensor([1.0, 4.0]), torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)]
    assert count_lowest(scores, 3, [2, 3]) == [1, 2]


def test_gradual_budget_by_layer():
    budget = GradualBudget(0.1)
    full = {"a": pattern(10), "b": pattern(10)}
    budget.begin(full)
    schedule = GradualSchedule(100, 10, start_fraction=0.0, end_fraction=1.0)
    # After step 50 (1 - 0.5)^3 = 0.125 of the way from 10 to 1 is left: 1 + 1.125 blocks.
    found = budget.counts(survey(full, schedule=schedule, step=50))
    assert found == {"a": (8, 0), "b": (8, 0)}
    found = budget.counts(survey({"a": pattern(2), "b": pattern(1)}, schedule=schedule, step=100))
    assert found == {"a": (1, 0), "b": (0, 0)}


def test_global_gradual_budget_keeps_one_block_per_layer():
    budget = GradualBudget(0.25, scope="global")
    patterns = {"a": pattern(4), "b": pattern(6)}
    budget.begin(patterns)
    scores = {"a": [0.0, 0.1, 0.2, 0.3], "b": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}
    schedule = GradualSchedule(100, 10, end_fraction=1.0)
    # A quarter of twenty positions, rounded by layer to 2 and 3: five of ten leave.
    found = budget.counts(survey(patterns, scores, schedule=schedule, step=100))
    assert found == {"a": (3, 0), "b": (2, 0)}


def test_gradual_budget_with_replacement():
    budget = GradualBudget(0.2)
    full = {"a": pattern(10)}
    budget.begin(full)
    schedule = GradualSchedule(100, 10, end_fraction=0.5, drop_fraction=0.5)
    # At the end of pruning 2 blocks are left; a quarter of them is none, half of 8 more is one.
    found = budget.counts(survey(full, schedule=schedule, step=50, regrow_dropped=True))
    assert found == {"a": (8, 0)}
    budget = GradualBudget(0.4)
    budget.begin(full)
    found = budget.counts(survey(full, schedule=schedule, step=50, regrow_dropped=True))
    assert found == {"a": (7, 1)}
    assert budget.counts(survey(full, schedule=schedule, step=50)) == {"a": (6, 0)}


def test_soft_budget():
    budget = SoftBudget()
    budget.begin(TWO)
    schedule = ElasticSchedule(100, 10, 0.5, end_fraction=1.0)
    step = survey(TWO, schedule=schedule, step=10)
    grow = {name: schedule.drop_count(10, p.nnz) for name, p in TWO.items()}
    assert budget.counts(step) == {name: (0, grow[name]) for name in TWO}
    larger = {"a": pattern(6), "b": pattern(9)}
    assert budget.counts(survey(larger, schedule=schedule, step=100)) == {"a": (2, 0), "b": (3, 0)}


class Means(LastStep):
    """A history with given mean magnitudes."""

    def __init__(self, **means):
        super().__init__()
        self.means = means

    def at(self, layer, pattern):
        return torch.full((pattern.nnz,), self.means[layer])


def count_by_momentum(patterns, history):
    budget = MomentumBudget()
    budget.begin(patterns)
    return budget.counts(survey(patterns, history=history))


def test_momentum_budget():
    three = {"a": pattern(4, (10, 10)), "b": pattern(6, (10, 10)), "c": pattern(10, (10, 10))}
    history = Means(a=1.0, b=-2.0, c=5.0)
    # Ten leave; 10/8, 20/8 and 50/8 join: 1.25, 2.5, 6.25, and the largest remainder is b's.
    found = count_by_momentum(three, history)
    assert found == {"a": (2, 1), "b": (3, 3), "c": (5, 6)}
    found = count_by_momentum(three, Means(a=0.0, b=0.0, c=0.0))
    assert found == {"a": (2, 2), "b": (3, 3), "c": (5, 5)}
    # There is room for one in c: the rest is shared by a and b, one to two.
    three["c"] = pattern(10, (1, 11))
    found = count_by_momentum(three, history)
    assert found == {"a": (2, 3), "b": (3, 6), "c": (5, 1)}
    with pytest.raises(ValueError, match="momentum of layer 'b' is nan"):
        count_by_momentum(three, Means(a=1.0, b=float("nan"), c=1.0))


def test_momentum_budget_of_nearly_full_layers():
    found = count_by_momentum({"a": pattern(9), "b": pattern(8)}, Means(a=1.0, b=1.0))
    assert sum(c.drop for c in found.values()) == sum(c.grow for c in found.values()) == 3


@given(st.data())
def test_apportion(data):
    layers = data.draw(st.integers(1, 6))
    most = data.draw(st.lists(st.integers(0, 50), min_size=layers, max_size=layers))
    weights = data.draw(st.lists(st.floats(0, 100), min_size=layers, max_size=layers))
    total = data.draw(st.integers(0, sum(most)))
    found = apportion(total, weights, most)
    assert sum(found) == total
    assert all(0 <= f <= m for f, m in zip(found, most, strict=True))
    scale = sum(weights)
    if scale and all(total * w / scale < m for w, m in zip(weights, most, strict=True)):
        assert all(abs(f - total * w / scale) <= 1 for f, w in zip(found, weights, strict=True))


def test_bad_budgets():
    with pytest.raises(ValueError, match="cannot share 5 among layers with room for 4"):
        apportion(5, [1.0], [4])
    with pytest.raises(ValueError, match="scope must be one of layer, global, got 'all'"):
        GradualBudget(0.1, scope="all")
    with pytest.raises(ValueError, match="leave out allocation and densities"):
        GradualBudget(0.1, scope="global", allocation="erk")
    with pytest.raises(ValueError, match="density must be a number"):
        GradualBudget(0.0).begin(TWO)
    with pytest.raises(ValueError, match="end with 5 blocks in layer 'a', which has 4 now"):
        GradualBudget(0.5).begin(TWO)
    with pytest.raises(ValueError, match="end with 18 blocks in all layers, which have 10 now"):
        GradualBudget(0.9, scope="global").begin(TWO)
    budget = GradualBudget(0.1)
    budget.begin(TWO)
    with pytest.raises(TypeError, match="expected a GradualSchedule, got ConstantSchedule"):
        budget.counts(survey(TWO))
    with pytest.raises(TypeError, match="define counts"):
        Budget().counts(survey(TWO))
    mixed = {"a": pattern(4), "b": pattern(1, (4, 4), 2)}
    for budget in (GlobalBudget(), MomentumBudget(), GradualBudget(0.1, scope="global")):
        with pytest.raises(ValueError, match="must have one block size, got 1 in 'a', 2 in 'b'"):
            budget.begin(mixed)


def test_pruning_frees_memory():
    model = nn.Sequential(SparseLinear(64, 64, density=1.0), nn.ReLU(), SparseLinear(64, 8, 1.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = ds.GMP(model, optimizer, total_steps=40, update_interval=5, final_density=0.1)
    parameter, heard = model[0].values, []
    trainer.on_update.append(lambda step, rewirings: heard.append(step))
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        trainer.step()
    assert heard == [5, 10, 15, 20, 25, 30]
    assert model[0].values is parameter
    assert model[0].pattern.nnz == 410 == len(parameter) == len(parameter.grad)
    assert parameter.untyped_storage().nbytes() == 4 * 410
    for state in optimizer.state[parameter].values():
        assert state.dim() == 0 or state.untyped_storage().nbytes() == 4 * 410
    assert trainer.layers["0"].index.cols.shape == (410,)


def test_bad_algorithms():
    model = nn.Sequential(SparseLinear(8, 8, density=0.5))
    o = torch.optim.SGD(model.parameters(), lr=0.1)
    cases = {
        "budget must be one of layer, global": lambda: ds.RigL(model, o, total_steps=9, budget="x"),
        r"momentum must be a number in \[0, 1\)": lambda: ds.SNFS(
            model, o, total_steps=9, momentum=1.0
        ),
        "window must be an integer of at least 1": lambda: ds.SNFS(
            model, o, total_steps=9, window=0
        ),
        "gradient_weight must be a finite number": lambda: ds.MEST(
            model, o, total_steps=9, gradient_weight=-1
        ),
        "density may be None only when densities": lambda: ds.GMP(model, o, total_steps=9),
        "pruning must begin before it ends": lambda: ds.GMP(
            model, o, total_steps=9, final_density=0.1, start_fraction=0.9
        ),
        "end with 51 blocks in all layers, which have 32": lambda: ds.GraNet(
            model, o, total_steps=9, final_density=0.8
        ),
        r"forward_fraction must be a number in \(0, 1\]": lambda: ds.TopKAST(
            model, o, total_steps=9, forward_fraction=0.0
        ),
        "exploration must be a finite number": lambda: ds.TopKAST(
            model, o, total_steps=9, exploration=float("inf")
        ),
        "l1 must be a finite number": lambda: ds.DeepR(model, o, total_steps=9, l1=-1),
        "temperature must be a finite number": lambda: ds.DeepR(
            model, o, total_steps=9, temperature="hot"
        ),
        "give total_steps": lambda: ds.SNFS(model, o),
        "scale must be a finite number": lambda: ds.training.GradientStep(-1.0),
    }
    for message, make in cases.items():
        with pytest.raises(ValueError, match=message):
            make()
    assert not model[0].resizable


@pytest.mark.parametrize("algorithm", ["GMP", "MEST"])
def test_layer_that_was_frozen_at_the_start_raises(algorithm):
    model = nn.Sequential(SparseLinear(8, 8, density=0.5), SparseLinear(8, 8, density=0.5))
    model[0].values.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"final_density": 0.2} if algorithm == "GMP" else {"soft_memory_bound": True}
    trainer = getattr(ds, algorithm)(model, optimizer, total_steps=10, update_interval=1, **options)
    model[0].values.requires_grad_(True)
    model(torch.randn(4, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="layer '0' was frozen when the trainer was made"):
        trainer.step()
