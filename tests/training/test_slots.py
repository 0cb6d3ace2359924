"""Updates keep values in their slots, so state with an entry per weight stays valid."""

import collections
import copy
import warnings

import pytest
import torch
from torch import nn

import dynsparse as ds
import popsparse
from dynsparse._core import native
from dynsparse.nn import SparseLinear
from dynsparse.ops.grow import random_outside
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.training import rewire_state

IN, OUT, STEPS = 24, 20, 12


def network(block=1):
    g = torch.Generator().manual_seed(0)
    return nn.Sequential(SparseLinear(IN, OUT, 0.3, block, generator=g), nn.Tanh())


def update(layer, optimizer, generator):
    """Apply an update that drops random weights and grows random positions."""
    pattern = layer.pattern
    count = pattern.nnz * 2 // 5
    drop = torch.randperm(pattern.nnz, generator=generator)[:count]
    grow = random_outside(pattern, count, generator=generator)
    rewiring = Rewiring.make(pattern, drop, grow)
    layer.rewire(rewiring)
    rewire_state(optimizer, layer.values, rewiring)
    return rewiring


def train(model, optimizer, after=lambda: None):
    g = torch.Generator().manual_seed(1)
    made = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(16, IN, generator=g)).square().mean().backward()
        optimizer.step()
        if step % 3 == 2:
            made.append(update(model[0], optimizer, g))
        after()
    return made


@pytest.mark.parametrize("block", [1, 4])
def test_kept_blocks_keep_their_slots(block):
    model = network(block)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for rewiring in train(model, optimizer):
        before, after, grown = rewiring.before.flat, rewiring.after.flat, rewiring.grown
        assert rewiring.keeps_slots
        assert torch.equal(grown, rewiring.dropped)
        stays = torch.ones(len(before), dtype=torch.bool)
        stays[grown] = False
        assert torch.equal(before[stays], after[stays])
        assert not torch.isin(after[grown], before).any()
        assert torch.equal(after[grown], after[grown].sort().values)
    layer = model[0]
    assert len(layer.pattern.slots)
    assert torch.equal(layer.rows, layer.pattern.rows)
    x = torch.randn(7, IN)
    torch.testing.assert_close(layer(x), x @ layer.to_dense().t() + layer.bias)


def test_training_equals_that_in_row_major_order(monkeypatch):
    """Bit for bit with kernels, which add each sum in the same order; else up to rounding."""
    found = []
    make = Rewiring.make
    for row_major in (False, True):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        positions = []

        def by_position(pattern, drop, grow, way=row_major, positions=positions):
            # The same connections leave, whatever their slots.
            drop = drop if way else pattern.slots[drop].long() if len(pattern.slots) else drop
            positions.append(pattern.flat[drop].sort().values)
            return make(pattern, drop, grow, row_major=way)

        monkeypatch.setattr(Rewiring, "make", staticmethod(by_position))
        train(model, optimizer)
        state, pattern = optimizer.state[model[0].values], model[0].pattern
        moments = [pattern.to_dense(state[key]) for key in ("exp_avg", "exp_avg_sq")]
        found.append([*positions, pattern.to_mask(), model[0].to_dense(), *moments])
    for got, wanted in zip(*found, strict=True):
        if native.load() is None:
            torch.testing.assert_close(got, wanted)
        else:
            assert torch.equal(got, wanted)


class InLists(torch.optim.Optimizer):
    """Keeps a moment in a list, where updates do not find it."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            (moment,) = self.state[p].setdefault("moments", [torch.zeros_like(p)])
            moment.lerp_(p.grad, 0.1)
            p.add_(moment, alpha=-1e-2)


def test_state_in_lists_stays_valid_for_kept_weights_and_warns():
    model = network()
    optimizer = InLists(model.parameters())
    moments = []

    def look():
        layer = model[0]
        moments.append(layer.pattern.to_dense(optimizer.state[layer.values]["moments"][0]))

    with pytest.warns(RuntimeWarning, match="InLists keeps the state 'moments'") as said:
        made = train(model, optimizer, look)
    assert len(said) == 1
    twin = network()
    other = InLists(twin.parameters())
    for _ in range(3):
        other.zero_grad()
    first = made[0]
    kept = first.before.to_mask() & first.after.to_mask()
    g = torch.Generator().manual_seed(1)
    for _ in range(3):
        other.zero_grad()
        twin(torch.randn(16, IN, generator=g)).square().mean().backward()
        other.step()
    wanted = twin[0].pattern.to_dense(other.state[twin[0].values]["moments"][0])
    assert kept.sum() > 50
    assert torch.equal(moments[2][kept], wanted[kept])


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer and has no state of its own, as ZeroRedundancyOptimizer, Lookahead and
    SAM."""

    def __init__(self, parameters):
        self.inner = torch.optim.Adam(parameters, lr=1e-2)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        self.inner.step()


@pytest.mark.parametrize("block", [1, 4])
def test_wrapped_optimizer_equals_the_bare_one(block):
    found = []
    for make in (Wrapper, lambda parameters: torch.optim.Adam(parameters, lr=1e-2)):
        model = network(block)
        optimizer = make(model.parameters())
        trainer = ds.RigL(model, optimizer, total_steps=100, update_interval=2)
        g = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(16, IN, generator=g)).square().mean().backward()
            trainer.step()
        assert trainer.updates > 3
        state = getattr(optimizer, "inner", optimizer).state[model[0].values]
        found.append((model[0].values, state["exp_avg"], state["exp_avg_sq"]))
        assert model[0].pattern != network(block)[0].pattern
    assert all(map(torch.equal, *found))


class LookaheadWrapper(torch.optim.Optimizer):
    """Pulls weights back to a slow copy after each step of the wrapped optimizer, as Lookahead;
    like timm's, it has hooks but does not call torch's constructor."""

    def __init__(self, parameters):
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)
        self.param_groups, self.defaults = self.optimizer.param_groups, {}
        self.state = collections.defaultdict(dict)
        self._optimizer_step_pre_hooks = collections.OrderedDict()
        self._optimizer_step_post_hooks = collections.OrderedDict()

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("slow", p.clone())
        self.optimizer.step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["slow"].lerp_(p, 0.5)
            p.copy_(self.state[p]["slow"])


@pytest.mark.parametrize("by_trainer", [True, False])
@pytest.mark.parametrize("algorithm", ["RigL", "GMP"])
def test_update_follows_the_outermost_step(algorithm, by_trainer):
    """Grown weights are zero afterwards, and the outer optimizer's state follows the pattern."""
    model = network()
    optimizer = LookaheadWrapper(model.parameters())
    more = {"final_density": 0.05} if algorithm == "GMP" else {}
    trainer = getattr(ds, algorithm)(model, optimizer, total_steps=40, update_interval=2, **more)
    assert trainer.optimizer is optimizer
    values, seen = model[0].values, []

    def check(step, rewirings):
        grown = rewirings["0"].grown
        assert not values[grown].any()
        assert torch.equal(optimizer.state[values]["slow"], values)
        seen.append(len(grown))

    trainer.on_update.append(check)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(16, IN)).square().mean().backward()
        trainer.step() if by_trainer else optimizer.step()
    assert trainer.steps == STEPS
    assert len(seen) > 3
    assert any(seen) == (algorithm == "RigL")


class SamLikeWrapper(torch.optim.Optimizer):
    """Steps the wrapped optimizer in `second_step`, as SAM."""

    def __init__(self, parameters):
        self.base_optimizer = torch.optim.Adam(parameters, lr=1e-2)
        super().__init__(self.base_optimizer.param_groups, {})
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure=None):
        raise NotImplementedError

    @torch.no_grad()
    def first_step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["old"])
        self.base_optimizer.step()


def test_step_of_the_inner_optimizer_counts():
    model = network()
    optimizer = SamLikeWrapper(model.parameters())
    trainer = ds.RigL(model, optimizer, total_steps=100, update_interval=2)
    for _ in range(STEPS):
        x = torch.randn(16, IN)
        for step in (optimizer.first_step, optimizer.second_step):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            step()
    assert trainer.steps == STEPS
    assert trainer.updates > 3


class Codes(torch.optim.SGD):
    """Keeps a code per weight and a table of the codes' values, as bitsandbytes."""

    def keep(self, values):
        table = torch.linspace(-1, 1, 255)
        codes = torch.full(values.shape, 200, dtype=torch.uint8)
        self.state[values] = {"state1": codes, "qmap1": table, "absmax1": torch.ones(2)}


@pytest.mark.parametrize("block", [1, 4])
def test_codes_of_grown_weights_mean_zero(block):
    model = network(block)
    optimizer = Codes(model.parameters(), lr=0.1)
    values, pattern = model[0].values, model[0].pattern
    optimizer.keep(values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rewire_state(
            optimizer, values, Rewiring.make(pattern, torch.arange(3), random_outside(pattern, 3))
        )
    codes = optimizer.state[values]["state1"]
    assert (codes[:3] == 127).all()
    assert (codes[3:] == 200).all()
    rewiring = Rewiring.make(pattern, torch.arange(3), random_outside(pattern, 3), row_major=True)
    with pytest.raises(ValueError, match="Codes keeps the state 'qmap1'"):
        rewire_state(optimizer, values, rewiring)


def test_average_in_a_list_of_tensors():
    """For a weight that is always present, it is the average of that weight."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    average = [p.detach().clone() for p in model.parameters()]
    dense = model[0].to_dense().detach()
    always = model[0].pattern.to_mask()

    @torch.no_grad()
    def follow():
        for own, p in zip(average, model.parameters(), strict=True):
            own.lerp_(p, 0.1)
        dense.lerp_(model[0].to_dense(), 0.1)
        always.logical_and_(model[0].pattern.to_mask())

    train(model, optimizer, follow)
    assert always.sum() > 10
    own = model[0].pattern.to_dense(average[0])
    torch.testing.assert_close(own[always], dense[always], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["RigL", "GMP", "DeepR"])
@pytest.mark.parametrize("with_optimizer", [False, True])
def test_loading_an_earlier_model_during_training(name, with_optimizer):
    """Connections in both patterns keep their moments and the others reset, unless the optimizer's
    state is loaded too."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    more = {"final_density": 0.1} if name == "GMP" else {}
    trainer = getattr(ds, name)(model, optimizer, total_steps=100, update_interval=2, **more)
    g = torch.Generator().manual_seed(1)

    def step():
        optimizer.zero_grad()
        model(torch.randn(16, IN, generator=g)).square().mean().backward()
        return trainer.step()

    for _ in range(4):
        step()
    best, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    old, layer = model[0].pattern, model[0]
    for _ in range(5):
        step()
    if name == "DeepR":
        signs = layer.pattern.to_dense(trainer.signs["0"])
    moments = layer.pattern.to_dense(optimizer.state[layer.values]["exp_avg"])
    survives = layer.pattern.to_mask() & old.to_mask()
    assert 0 < survives.sum() < old.nnz
    model.load_state_dict(best)
    if with_optimizer:
        optimizer.load_state_dict(state)
        wanted = old.to_dense(state["state"][0]["exp_avg"])
    else:
        wanted = torch.where(survives, moments, 0)
    optimizer.zero_grad()
    model(torch.zeros(16, IN)).sum().backward()  # moments decay, and nothing is added
    trainer.before_optimizer_step()
    optimizer.step()
    now = old.to_dense(optimizer.state[layer.values]["exp_avg"])
    torch.testing.assert_close(now, 0.9 * wanted)
    if name == "DeepR":
        kept = old.to_dense(trainer.signs["0"])
        assert torch.equal(kept[survives], signs[survives])
    trainer.after_optimizer_step()
    for _ in range(4):
        step()
    assert trainer.steps == 14


def test_rewiring_of_a_pattern_with_other_slots_raises():
    layer = network()[0]
    pattern = layer.pattern
    order = torch.randperm(pattern.nnz, generator=torch.Generator().manual_seed(0))
    other = SparsePattern._from_slots(pattern.flat[order], pattern)
    assert other == pattern
    rewiring = Rewiring.make(other, torch.tensor([0]), random_outside(pattern, 1))
    with pytest.raises(ValueError, match="the rewiring starts from"):
        layer.rewire(rewiring)


def test_values_without_positions_raise():
    model, other = network(), network()
    state = {key: t for key, t in other.state_dict().items() if not key.endswith(("rows", "cols"))}
    with pytest.raises(RuntimeError, match=r"0\.values without 0\.rows and 0\.cols"):
        model.load_state_dict(state, strict=False)
    model.load_state_dict({}, strict=False)


def test_training_continues_from_files_and_copies(tmp_path):
    model = network()
    train(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    wanted = model[0].to_dense()
    assert len(model[0].pattern.slots)
    ds.save_safetensors(model, tmp_path / "model.safetensors")
    loaded, stated = network(), network()
    ds.load_safetensors(loaded, tmp_path / "model.safetensors")
    stated.load_state_dict(model.state_dict())
    found = []
    for other in (loaded, stated, copy.deepcopy(model)):
        assert torch.equal(other[0].to_dense(), wanted)
        assert other is loaded or torch.equal(other[0].pattern.flat, model[0].pattern.flat)
        optimizer = torch.optim.Adam(other.parameters(), lr=1e-2)
        trainer = ds.RigL(other, optimizer, total_steps=60, update_interval=2)
        g = torch.Generator().manual_seed(3)
        for _ in range(6):
            optimizer.zero_grad()
            other(torch.randn(8, IN, generator=g)).square().mean().backward()
            trainer.step()
        assert trainer.updates
        found.append(other[0].to_dense())
    for other in found[1:]:  # whose sums may have another order
        assert torch.equal(other != 0, found[0] != 0)
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-7)
    assert torch.equal(ds.densify(copy.deepcopy(model))[0].weight, wanted)


def test_target_rejects_slots_not_in_row_major_order():
    layer = SparseLinear(16, 8, 0.5, target=popsparse.Target.bow())
    before = copy.deepcopy(layer.state_dict())
    flipped = {name: before[name].flip(0) for name in ("rows", "cols", "values")}
    with pytest.raises(RuntimeError, match="not in row-major order, which shards"):
        layer.load_state_dict({**before, **flipped})
    pattern = layer.pattern
    drop, grow = torch.arange(3), random_outside(pattern, 3)
    with pytest.raises(ValueError, match="make rewirings with row_major=True"):
        layer.rewire(Rewiring.make(pattern, drop, grow.flip(0)))
    assert all(torch.equal(tensor, before[key]) for key, tensor in layer.state_dict().items())
    layer.rewire(Rewiring.make(pattern, drop, grow, row_major=True))
