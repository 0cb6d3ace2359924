"""Trainers on several ranks, each a thread, against the same training in one."""

from __future__ import annotations

import copy

import pytest
import torch
from rank_trainings import ALGORITHMS, apart, backward, layers_of, model_of, optimizer_of, weights
from threaded import over

import dynsparse as ds
from dynsparse.ranks import in_threads
from dynsparse.training import GMP, ConstantSchedule

STEPS = 5


def average(ranks, model):
    """What DistributedDataParallel does with gradients."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            ranks.sum(parameter.grad).div_(ranks.size)


def train(name, ranks=None, *, block_size=1, kind="sgd", passes=1, model=None, steps=STEPS):
    """What the training came to after every step."""
    model = model_of(block_size=block_size) if model is None else model
    optimizer = optimizer_of(model, kind)
    trainer = ALGORITHMS[name](model, optimizer, ranks=ranks)
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    seen = []
    for step in range(1, steps + 1):
        backward(model, optimizer, step, rank, size, passes)
        if ranks is not None:
            average(ranks, model)
        trainer.step()
        seen.append(weights(model))
    return seen


def check(expected, results):
    for seen in results:
        for one, other in zip(expected, seen, strict=True):
            same, difference = apart(one, other)
            assert same
            assert difference <= 1e-10
    # Between ranks the same bits.
    for seen in results[1:]:
        assert all(apart(a, b) == (True, 0.0) for a, b in zip(results[0], seen, strict=True))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_ranks_train_as_one_process_does(name, size):
    expected = train(name)
    if name != "static":
        assert not apart(expected[0], expected[-1])[0], "no pattern changed"
    check(expected, over(size, lambda ranks: train(name, ranks)))


@pytest.mark.parametrize("name", ["rigl", "set", "gmp", "granet", "topkast", "deepr", "snfs"])
@pytest.mark.parametrize("block_size", [2, 4])
def test_blocks_too(name, block_size):
    expected = train(name, block_size=block_size, kind="adam")
    check(expected, over(2, lambda ranks: train(name, ranks, block_size=block_size, kind="adam")))


def test_micro_batches_count_once_each():
    check(train("rigl", passes=3), over(2, lambda ranks: train("rigl", ranks, passes=3)))


def said(size, work):
    """The one error that all ranks raise."""
    errors = in_threads(size, work, 20)
    assert len({(type(e), str(e)) for e in errors}) == 1, errors
    return f"{type(errors[0]).__name__}: {errors[0]}"


def made(ranks, make, **model):
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
            lambda r: ds.SET(
                *r.model, schedule=EVERY, ranks=r.ranks,
                generator=torch.Generator().manual_seed(r.rank),
            ),
            "ValueError: ranks disagree on the state of the generator: rank 0 differs from rank 1; "
            "give generators of one state on every rank",
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
    ids=["seed", "generator", "schedule", "algorithm", "option", "argument"],
)  # fmt: skip
def test_other_arguments_are_one_line_on_all_ranks(make, line):
    class Rank:
        def __init__(self, ranks):
            model = model_of()
            self.ranks, self.rank, self.model = ranks, ranks.rank, (model, optimizer_of(model))

    assert said(2, lambda ranks: make(Rank(ranks))) == line


def test_other_layers_are_one_line():
    def other(ranks):
        model = model_of()
        if ranks.rank:
            model = torch.nn.Sequential(torch.nn.Tanh(), *model)
        ds.RigL(model, optimizer_of(model), schedule=EVERY, ranks=ranks)

    assert said(2, other) == (
        "ValueError: ranks disagree on the layers: rank 0: '0', '2', rank 1: '1', '3'; pass "
        "ranks=None to train alone, or ranks=group, of the ranks that hold the same layers"
    )


def test_another_order_of_layers_is_one_line():
    def other(ranks):
        layers = {"a": model_of()[0], "b": model_of()[2]}
        names = sorted(layers, reverse=ranks.rank == 1)
        model = torch.nn.ModuleDict({name: layers[name] for name in names})
        ds.RigL(model, optimizer_of(model), schedule=EVERY, ranks=ranks)

    assert said(2, other).startswith(
        "ValueError: ranks disagree on the layers: rank 0: 'a', 'b', rank 1: 'b', 'a'; "
    )


def test_another_density_is_one_line():
    def other(ranks):
        model = model_of(density=0.3 if ranks.rank else 0.2)
        ds.RigL(model, optimizer_of(model), schedule=EVERY, ranks=ranks)

    line = said(2, other)
    assert line.startswith("ValueError: ranks disagree on ")
    assert "'0': [24, 16, 1, 77]" in line
    assert "'0': [24, 16, 1, 115]" in line


def test_other_patterns_become_those_of_the_first_rank():
    def work(ranks):
        model = model_of(seed=ranks.rank)
        ds.Static(model, optimizer_of(model), ranks=ranks)
        return weights(model)

    for got in over(3, work):
        assert apart(got, weights(model_of(seed=0))) == (True, 0.0)


def test_other_patterns_with_optimizer_state_are_refused():
    def work(ranks):
        model = model_of(seed=ranks.rank)
        optimizer = optimizer_of(model)
        backward(model, optimizer, 1)
        optimizer.step()
        ds.RigL(model, optimizer, schedule=EVERY, ranks=ranks)

    assert said(2, work) == (
        "RuntimeError: layer '0' differs among the ranks, and the optimizer has state for it: load "
        "the same checkpoint on every rank"
    )


def test_a_seed_left_out_is_that_of_the_first_rank():
    def work(ranks):
        return made(ranks, lambda m, o: ds.SET(m, o, schedule=EVERY, ranks=ranks))[1].growth.seed

    assert len(set(over(3, work))) == 1


def steps_of(ranks, trainer, model, spoil=None, steps=3):
    for step in range(1, steps + 1):
        backward(model, trainer.optimizer, step, ranks.rank, ranks.size)
        average(ranks, model)
        if spoil is not None:
            spoil(step, trainer, model)
        trainer.step()


def rigl(ranks, **options):
    model = model_of()
    return model, ds.RigL(model, optimizer_of(model), schedule=OTHER, ranks=ranks, **options)


def test_nan_on_one_rank_is_one_line_and_changes_nothing():
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
    assert said(3, work) == (
        "ValueError: rank 1: layer '2': x holds NaN or infinity, and this step ends in a pattern "
        "update, which would rank by it: the training has diverged, or the loss is scaled too far"
    )
    assert [steps for steps, _ in before] == [1, 1, 1]
    assert all(apart(before[0][1], other) == (True, 0.0) for _, other in before)


def test_a_failing_function_of_the_users_on_one_rank_undoes_all():
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
    assert said(2, work) == "RuntimeError: rank 1: layer '0': KeyError: 'mine'"
    assert [steps for steps, _ in left] == [1, 1]
    assert all(pattern == model_of()[0].pattern for _, pattern in left)


def test_a_layer_that_one_rank_did_not_use_counts_as_zeros_there():
    """As one process with the samples of the rank that did."""

    def run(ranks, rank, size):
        model = model_of()
        optimizer = optimizer_of(model)
        trainer = ds.RigL(model, optimizer, schedule=EVERY, ranks=ranks)
        optimizer.zero_grad()
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        first = model[1](model[0](x))
        (first.square().mean() / size).backward(retain_graph=True)
        if rank == 0:
            (model[2](first.detach()).square().mean() / size).backward()
        else:
            model[2].values.grad = torch.zeros_like(model[2].values)
            model[2].bias.grad = torch.zeros_like(model[2].bias)
        return model, trainer

    def work(ranks):
        model, trainer = run(ranks, ranks.rank, ranks.size)
        for parameter in model.parameters():
            ranks.sum(parameter.grad)
        trainer.step()
        return weights(model)

    model = model_of()
    optimizer = optimizer_of(model)
    trainer = ds.RigL(model, optimizer, schedule=EVERY, ranks=None)
    for rank in range(2):
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        first = model[1](model[0](x))
        (first.square().mean() / 2).backward(retain_graph=True)
        if rank == 0:
            (model[2](first.detach()).square().mean() / 2).backward()
    trainer.step()
    for got in over(2, work):
        same, difference = apart(got, weights(model))
        assert same
        assert difference < 1e-12


def test_ranks_with_gradients_of_their_own_are_told():
    def work(ranks):
        model, trainer = rigl(ranks)
        for step in range(1, 3):
            backward(model, trainer.optimizer, step, ranks.rank, ranks.size)
            trainer.step()

    line = said(2, work)
    assert line.startswith("RuntimeError: layer '0': rank 0 and rank 1 have other gradients, so ")
    assert "wrap it in DistributedDataParallel" in line


def test_another_state_on_one_rank_is_told_before_the_update():
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

    assert said(2, work).startswith(
        "ValueError: ranks disagree on the step that ends in an update: rank 0: 2, rank 1: 4; "
    )


def test_a_pattern_that_was_changed_on_one_rank_is_told_and_nothing_changes():
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

    line = said(2, work)
    assert line.startswith("ValueError: ranks disagree on the pattern of layer '2' ")
    assert "rank 0 differs from rank 1" in line


def test_keyed_draws_do_not_depend_on_the_order_of_layers():
    model = model_of()
    backwards = torch.nn.ModuleDict({"2": model[2], "0": model[0]})
    one = ds.SET(model, optimizer_of(model), schedule=EVERY, seed=3)
    other = ds.SET(backwards, optimizer_of(model), schedule=EVERY, seed=3)
    for name in ("0", "2"):
        a, b = (t.growth.generator_for(name, 5, "positions").get_state() for t in (one, other))
        assert torch.equal(a, b)


def test_resume_from_a_state_with_a_generator_goes_on_with_it():
    """As checkpoints from before draws followed from a seed have it."""

    def train_(trainer, model, steps):
        for step in steps:
            backward(model, trainer.optimizer, step)
            trainer.step()

    model = model_of()
    generator = torch.Generator().manual_seed(9)
    trainer = ds.SET(model, optimizer_of(model), schedule=EVERY, generator=generator)
    train_(trainer, model, range(1, 3))
    state = trainer.state_dict()
    del state["growth_state"]["seed"]
    parts = {k: v.clone() for k, v in model.state_dict().items()}
    inner = copy.deepcopy(trainer.optimizer.state_dict())
    again = model_of()
    resumed = ds.SET(again, optimizer_of(again), schedule=EVERY, seed=1)
    again.load_state_dict(parts)
    resumed.optimizer.load_state_dict(inner)
    resumed.load_state_dict(state)
    assert resumed.growth.seed is None
    train_(trainer, model, range(3, 6))
    train_(resumed, again, range(3, 6))
    assert apart(weights(model), weights(again)) == (True, 0.0)


def test_resizing_states_follow():
    """Moments of Adam are as large as the values on every rank."""

    def work(ranks):
        model = model_of(density=0.6)
        optimizer = optimizer_of(model, "adam")
        trainer = GMP(model, optimizer, total_steps=8, update_interval=1, final_density=0.1,
                      ranks=ranks)  # fmt: skip
        steps_of(ranks, trainer, model, steps=7)
        return [
            len(optimizer.state[layer.values]["exp_avg"]) for layer in layers_of(model).values()
        ]

    assert len({tuple(sizes) for sizes in over(2, work)}) == 1
