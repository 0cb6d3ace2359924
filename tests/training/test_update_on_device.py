"""Pattern updates of layers off the CPU give the same patterns, in place."""

import copy
import pickle

import pytest
import torch
from device_trainings import TIMES, backward, both, model, same, train
from tiers import algorithms
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dynsparse as ds
from dynsparse import training
from dynsparse.nn import SparseLinear
from dynsparse.nn.active_set import ActiveSet
from dynsparse.ops.grow import topk_outside
from dynsparse.ranks import GrowRequest
from dynsparse.training import update_on_device
from dynsparse.training.algorithms import BY_NAME
from dynsparse.training.grow import GradientGrowth, GradientStep

ALGORITHMS = {
    "deepr": ds.DeepR, "gmp": ds.GMP, "granet": ds.GraNet, "mest": ds.MEST, "rigl": ds.RigL,
    "set": ds.SET, "snfs": ds.SNFS, "topkast": ds.TopKAST,
}  # fmt: skip


@pytest.mark.parametrize("name", algorithms(ALGORITHMS))
def test_every_algorithm_equals_the_cpu(request, name):
    assert {*ALGORITHMS, "static"} == {*BY_NAME}
    algorithm = ALGORITHMS[name]
    more = {"final_density": 0.1} if name in ("gmp", "granet") else {}
    same(*both(request, lambda net, optimizer: algorithm(net, optimizer, **TIMES, **more)))


@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize("regrow", [False, True])
@pytest.mark.parametrize("start", [0.0, 0.01, GradientStep(), lambda *_: torch.tensor(0.5)])
def test_rigl_options_equal_the_cpu(request, b, regrow, start):
    def make(net, optimizer):
        more = {"regrow_dropped": regrow, "initial_value": start}
        return ds.RigL(net, optimizer, **TIMES, drop_fraction=0.5, **more)

    same(*both(request, make, b))


@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize(
    "make",
    [
        lambda *given: ds.RigL(*given, **TIMES, budget="global"),
        lambda *given: ds.RigL(*given, **TIMES, budget="global", regrow_dropped=True),
        lambda *given: ds.GMP(*given, **TIMES, final_density=0.1, scope="global"),
        lambda *given: ds.MEST(*given, **TIMES, soft_memory_bound=True),
        lambda *given: ds.SNFS(*given, **TIMES, window=None, initial_value=GradientStep()),
        lambda *given: ds.DeepR(*given, total_steps=30, update_interval=5, l1=1.0),
    ],
)
def test_budgets_equal_the_cpu(request, make, b):
    same(*both(request, make, b))


def test_own_growth_and_budget_equal_the_cpu(request):
    class FirstFree(training.Growth):
        def choose(self, requests, step, ranks):
            chosen = []
            for growth in requests:
                is_free = torch.ones(growth.pattern.total, dtype=torch.bool)
                is_free[growth.pattern.flat] = False
                chosen.append(is_free.nonzero().flatten()[: growth.count])
            return chosen

    class OneMore(training.Budget):
        changes_capacity = True

        def counts(self, survey):
            return {name: training.Counts(3, 4) for name in survey.patterns}

    class EveryFive:
        def is_due(self, step):
            return step % 5 == 0

    parts = {"schedule": EveryFive(), "growth": FirstFree(), "budget": OneMore()}
    here, there = both(request, lambda *given: training.SparseTrainer(*given, **parts))
    same(here, there)
    first, last = here[2][0], here[2][-1]
    assert [after.nnz - before.nnz for before, after in zip(first, last, strict=True)] == [4] * 4


def few(layer, rewiring):
    """Initial values for grown weights only."""
    return 0.01 * (rewiring.after.flat[rewiring.grown] + 1).double()


def test_initial_values_where_nothing_grows(request):
    """The last update of a soft memory bound, at step 23, only drops."""

    def make(*given):
        return ds.MEST(*given, **TIMES, soft_memory_bound=True, initial_value=few)

    here = train(model(), make, steps=23)
    request.getfixturevalue("off_cpu")
    same(here, train(model(), make, steps=23))


def test_initial_values_for_grown_or_all_slots(request):
    def all_of_them(layer, rewiring):
        return 0.01 * (rewiring.after._flat_on(layer.values.device) + 1).double()

    runs = [train(model(), lambda *given: ds.RigL(*given, **TIMES, initial_value=few))]
    runs.append(train(model(), lambda *given: ds.RigL(*given, **TIMES, initial_value=all_of_them)))
    request.getfixturevalue("off_cpu")
    for start in (few, all_of_them):
        runs.append(train(model(), lambda *g, s=start: ds.RigL(*g, **TIMES, initial_value=s)))
    for other in runs[1:]:
        same(runs[0], other)


def test_active_set_keeps_its_memory(off_cpu):
    net = model(4, torch.float32)
    own = ds.TopKAST(net, torch.optim.SGD(net.parameters(), lr=5.0), **TIMES)
    layers = list(own.layers.values())

    def memory():
        sets = [layer.active for layer in layers]
        tensors = [t for one in sets for t in (one.slots, *one._index[:3])]
        return [id(one) for one in sets] + [t.data_ptr() for t in tensors]

    backward(net)
    own.step()
    before, slots = memory(), [layer.active.slots.clone() for layer in layers]
    for _ in range(15):
        backward(net)
        own.step()
    assert own.updates
    assert memory() == before
    now = [layer.active.slots for layer in layers]
    assert not all(torch.equal(*pair) for pair in zip(slots, now, strict=True))
    for layer in layers:
        chosen, values = layer.active, layer.values.detach()
        fresh = ActiveSet(layer.pattern, chosen.slots, values.device)
        assert chosen.pattern == fresh.pattern
        assert all(torch.equal(a, b) for a, b in zip(chosen._index, fresh._index, strict=True))
        x = torch.randn(5, layer.in_features)
        dense = fresh.pattern.to_dense(values[chosen.slots])
        torch.testing.assert_close(layer(x), nn.functional.linear(x, dense, layer.bias))
        copied = pickle.loads(pickle.dumps(layer))
        torch.testing.assert_close(copied(x), layer(x))


def test_active_set_changed_between_forward_and_backward_raises(off_cpu):
    net = model(1, torch.float32)
    own = ds.TopKAST(net, torch.optim.SGD(net.parameters(), lr=0.1), **TIMES)
    y = net(torch.randn(12, 16))
    own._apply_own_state(own._plan_own_state({}))
    with pytest.raises(RuntimeError, match="have changed between forward and backward"):
        y.sum().backward()


def test_growth_returns_its_scores():
    pattern = ds.SparsePattern.random((16, 24), 0.2)
    pairs = [(torch.randn(5, 24), torch.randn(5, 16))]
    (plain,) = GradientGrowth().choose([GrowRequest("fc", pairs, pattern, 7)], 1)
    asked = [GrowRequest("fc", pairs, pattern, 7, ranked=[]) for _ in range(2)]
    wanted = topk_outside(pairs, pattern, 7, sort=False)
    for growth, found in zip(asked, GradientGrowth().choose(asked, 1), strict=True):
        assert torch.equal(found, plain)
        torch.testing.assert_close(growth.ranked, [wanted.scores])


def test_updates_keep_all_memory(off_cpu):
    net = model(4, torch.float32)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    trainer = ds.RigL(net, optimizer, **TIMES)

    def step():
        optimizer.zero_grad(set_to_none=False)
        net(torch.randn(12, 16)).square().mean().backward()
        return trainer.step()

    def addresses():
        tensors = [tensor for p in net.parameters() for tensor in (p, p.grad)]
        tensors += [t for state in optimizer.state.values() for t in state.values()]
        tensors += [t for layer in trainer.layers.values() for t in layer.index]
        return [tensor.data_ptr() for tensor in tensors]

    step()
    before = addresses()
    assert sum(step() is not None for _ in range(12)) == 2
    assert addresses() == before


def test_copies_of_trainers_continue(off_cpu):
    net = model(1, torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = ds.RigL(net, optimizer, **TIMES)
    net(torch.randn(12, 16)).square().mean().backward()
    twin = copy.deepcopy(trainer)
    for one in (trainer, twin):
        for _ in range(4):
            one.step()
        for layer in one.layers.values():
            layer(torch.randn(12, layer.in_features)).square().mean().backward()
        assert one.step() is not None


def test_layers_one_by_one_equal_the_cpu(request, monkeypatch):
    monkeypatch.setattr(update_on_device, "SLOTS_AT_ONCE", 1)
    same(*both(request, lambda *given: ds.RigL(*given, **TIMES)))


def test_growth_of_different_numbers_equals_the_cpu(request):
    """Two of four layers of a soft memory bound get fewer positions than the others."""

    class Fewer(GradientGrowth):
        def choose(self, requests, step, ranks):
            chosen = super().choose(requests, step, ranks)
            names = [growth.name for growth in requests]
            return [flat[int(n in ("0", "2")) :] for n, flat in zip(names, chosen, strict=True)]

    def make(net, optimizer):
        trainer = ds.MEST(net, optimizer, **TIMES, soft_memory_bound=True)
        trainer.growth = Fewer()
        return trainer

    here, there = both(request, make)
    same(here, there)
    sizes = [pattern.nnz for pattern in here[2][-1]]
    assert len({*sizes}) > 1


def test_equal_layers_are_updated_by_the_same_operators(off_cpu):
    """Each further layer adds few operators."""

    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += 1
            return function(*args, **(kwargs or {}))

    numbers = []
    for layers in (2, 6):
        net = nn.Sequential(*(SparseLinear(32, 32, 0.3, 4) for _ in range(layers)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=True)
        trainer = ds.RigL(net, optimizer, total_steps=30, update_interval=2)
        for _ in range(3):
            net(torch.randn(8, 32)).square().mean().backward()
            trainer.step()
        net(torch.randn(8, 32)).square().mean().backward()
        with Count() as count:
            trainer.step()
        assert trainer.updates == 2
        numbers.append(count.number)
    assert numbers[1] - numbers[0] <= 4 * 45
