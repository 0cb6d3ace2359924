"""Trainers whose ranks differ raise the same error on all ranks, or take the first rank's state."""

from __future__ import annotations

import pytest
import torch
from rank_trainings import (
    apart,
    average,
    backward,
    layers_of,
    model_of,
    optimizer_of,
    steps_of,
    weights,
)
from threaded import common_error, run_on_ranks

import dynsparse as ds
from dynsparse.training import ConstantSchedule


def error_on_all(size, work):
    """Return the error that all ranks raise, as text."""
    kind, text = common_error(size, work, 20)
    return f"{kind.__name__}: {text}"


def make_trainer(ranks, make, **model):
    model = model_of(**model)
    return model, make(model, optimizer_of(model))


EVERY = ConstantSchedule(100, 1, 0.3)
OTHER = ConstantSchedule(100, 2, 0.3)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda r: ds.SET(*r.model, schedule=EVERY, seed=r.rank, ranks=r.ranks),
            "ValueError: ranks disagree on the seed: rank 0: 0, rank 1: 1; give the same seed on "
            "every rank, or none",
        ),
        (
            lambda r: ds.RigL(*r.model, schedule=OTHER if r.rank else EVERY, ranks=r.ranks),
            "ValueError: ranks disagree on the schedule: rank 0: {'kind': 'ConstantSchedule', "
            "'total_steps': 100, 'update_interval': 1, 'drop_fraction': 0.3}, rank 1: {'kind': "
            "'ConstantSchedule', 'total_steps': 100, 'update_interval': 2, 'drop_fraction': 0.3}; "
            "make the trainer with the same arguments on every rank",
        ),
        (
            lambda r: (ds.SET if r.rank else ds.RigL)(*r.model, schedule=EVERY, ranks=r.ranks),
            "ValueError: ranks disagree on the algorithm (and 1 more): rank 0: 'RigL', rank 1: "
            "'SET'; make the trainer with the same arguments on every rank",
        ),
        (
            lambda r: ds.RigL(
                *r.model, schedule=EVERY, ranks=r.ranks, regrow_dropped=bool(r.rank)
            ),
            "ValueError: ranks disagree on the regrow_dropped: rank 0: False, rank 1: True; make "
            "the trainer with the same arguments on every rank",
        ),
        (
            lambda r: ds.RigL(
                *r.model, schedule=EVERY, ranks=r.ranks, initial_value="x" if r.rank else 0.0
            ),
            "TypeError: rank 1: initial_value must be a number or a function, got 'x'",
        ),
    ],
    ids=["seed", "schedule", "algorithm", "option", "argument"],
)  # fmt: skip
def test_different_arguments_raise(make, line):
    class Rank:
        def __init__(self, ranks):
            model = model_of()
            self.ranks, self.rank, self.model = ranks, ranks.rank, (model, optimizer_of(model))

    assert error_on_all(2, lambda ranks: make(Rank(ranks))) == line


def test_different_layers_raise():
    def other(ranks):
        model = model_of()
        if ranks.rank:
            model = torch.nn.Sequential(torch.nn.Tanh(), *model)
        ds.RigL(model, optimizer_of(model), schedule=EVERY, ranks=ranks)

    assert error_on_all(2, other) == (
        "ValueError: ranks disagree on the layers: rank 0: '0', '2', rank 1: '1', '3'; pass "
        "ranks=None to train alone, or ranks=group, of the ranks that hold the same layers"
    )


def test_different_order_of_layers_raises():
    def other(ranks):
        layers = {"a": model_of()[0], "b": model_of()[2]}
        names = sorted(layers, reverse=ranks.rank == 1)
        model = torch.nn.ModuleDict({name: layers[name] for name in names})
        ds.RigL(model, optimizer_of(model), schedule=EVERY, ranks=ranks)

    assert error_on_all(2, other).startswith(
        "ValueError: ranks disagree on the layers: rank 0: 'a', 'b', rank 1: 'b', 'a'; "
    )


def test_different_density_raises():
    def other(ranks):
        model = model_of(density=0.3 if ranks.rank else 0.2)
        ds.RigL(model, optimizer_of(model), schedule=EVERY, ranks=ranks)

    line = error_on_all(2, other)
    assert line.startswith("ValueError: ranks disagree on ")
    assert "'0': [24, 16, 1, 77]" in line
    assert "'0': [24, 16, 1, 115]" in line


def test_first_ranks_patterns_are_broadcast():
    def work(ranks):
        model = model_of(seed=ranks.rank)
        ds.Static(model, optimizer_of(model), ranks=ranks)
        return weights(model)

    for got in run_on_ranks(3, work):
        assert apart(got, weights(model_of(seed=0))) == (True, 0.0)


def test_different_patterns_with_optimizer_state_raise():
    def work(ranks):
        model = model_of(seed=ranks.rank)
        optimizer = optimizer_of(model)
        backward(model, optimizer, 1)
        optimizer.step()
        ds.RigL(model, optimizer, schedule=EVERY, ranks=ranks)

    assert error_on_all(2, work) == (
        "RuntimeError: layer '0' differs among the ranks, and the optimizer has state for it: load "
        "the same checkpoint on every rank"
    )


def test_default_seed_is_broadcast():
    def work(ranks):
        return make_trainer(ranks, lambda m, o: ds.SET(m, o, schedule=EVERY, ranks=ranks))[
            1
        ].growth.seed

    assert len(set(run_on_ranks(3, work))) == 1


def rigl(ranks, **options):
    model = model_of()
    return model, ds.RigL(model, optimizer_of(model), schedule=OTHER, ranks=ranks, **options)


def test_nan_on_one_rank_raises_and_changes_nothing():
    def spoil(step, trainer, model):
        if step == 2 and trainer.ranks.rank == 1:
            trainer._captures["2"][0][0][0, 0] = torch.nan

    def work(ranks):
        model, trainer = rigl(ranks)
        try:
            steps_of(ranks, trainer, model, spoil)
        finally:
            before.append((trainer.steps, weights(model)))

    before = []
    assert error_on_all(3, work) == (
        "ValueError: rank 1: layer '2': x holds NaN or infinity, and this step ends in a pattern "
        "update, which would rank by it: the training has diverged, or the loss is scaled too far"
    )
    assert [steps for steps, _ in before] == [1, 1, 1]
    assert all(apart(before[0][1], other) == (True, 0.0) for _, other in before)


def test_failing_initial_value_on_one_rank_changes_nothing():
    def work(ranks):
        def start(layer, rewiring):
            if ranks.rank == 1:
                raise KeyError("mine")
            return 0.0

        model, trainer = rigl(ranks, initial_value=start)
        try:
            steps_of(ranks, trainer, model)
        finally:
            left.append((trainer.steps, layers_of(model)["0"].pattern))

    left = []
    assert error_on_all(2, work) == "RuntimeError: rank 1: layer '0': KeyError: 'mine'"
    assert [steps for steps, _ in left] == [1, 1]
    assert all(pattern == model_of()[0].pattern for _, pattern in left)


def test_unreduced_gradients_raise():
    def work(ranks):
        model, trainer = rigl(ranks)
        for step in range(1, 3):
            backward(model, trainer.optimizer, step, ranks.rank, ranks.size)
            trainer.step()

    line = error_on_all(2, work)
    assert line.startswith("RuntimeError: layer '0': rank 0 and rank 1 have other gradients, so ")
    assert "wrap it in DistributedDataParallel" in line


def test_different_steps_raise_before_the_update():
    def work(ranks):
        model, trainer = rigl(ranks)
        if ranks.rank == 1:
            trainer.steps = 2
        backward(model, trainer.optimizer, 1, ranks.rank, ranks.size)
        average(ranks, model)
        trainer.before_optimizer_step()
        trainer.steps, due = 1 + 2 * ranks.rank, trainer._is_due(2)
        assert due
        trainer.before_optimizer_step()

    assert error_on_all(2, work).startswith(
        "ValueError: ranks disagree on the step that ends in an update: rank 0: 2, rank 1: 4; "
    )


def test_pattern_changed_on_one_rank_raises():
    def spoil(step, trainer, model):
        if step == 2 and trainer.ranks.rank == 1:
            layer = model[2]
            flat = layer.pattern.flat.clone()
            free = next(i for i in range(layer.pattern.total) if i not in flat.tolist())
            flat[0] = free
            pattern = ds.SparsePattern.from_flat(
                flat.sort().values, shape=layer.pattern.shape, block_size=1
            )
            layer.set_pattern(pattern)

    def work(ranks):
        model, trainer = rigl(ranks)
        steps_of(ranks, trainer, model, spoil)

    line = error_on_all(2, work)
    assert line.startswith("ValueError: ranks disagree on the pattern of layer '2' ")
    assert "rank 0 differs from rank 1" in line
