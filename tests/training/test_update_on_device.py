"""Pattern updates of layers that are not on the CPU: the same patterns, in place."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.nn.active import ActiveSet
from dynsparse.ops.grow import topk_outside
from dynsparse.pattern.arriving import Arriving
from dynsparse.ranks import GrowthWanted
from dynsparse.training import Telemetry, change, doubts, plan_there
from dynsparse.training.algorithms import BY_NAME
from dynsparse.training.grow import GradientGrowth
from dynsparse.training.initial import GradientStep
from dynsparse.training.records import Recorder, Records
from dynsparse.training.records.unwritten import unwritten

TIMES = {"total_steps": 30, "update_interval": 5}


def model(b=1, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    layers = [SparseLinear(16, 24, 0.4, b, generator=g), SparseLinear(24, 16, 0.4, b, generator=g)]
    return nn.Sequential(layers[0], nn.GELU(), layers[1]).to(dtype)


def train(net, make, steps=21):
    """What was computed and decided at each step."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    torch.manual_seed(0)
    trainer = make(net, optimizer)
    g = torch.Generator().manual_seed(1)
    dtype = next(net.parameters()).dtype
    patterns, losses = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.randn(12, 16, generator=g, dtype=dtype)).square().mean()
        loss.backward()
        rewirings = trainer.step()
        losses.append(float(loss.detach()))
        patterns.append([layer.pattern for layer in trainer.layers.values()])
        for name, rewiring in (rewirings or {}).items():
            assert trainer.layers[name].pattern is rewiring.after
    return trainer, optimizer, patterns, losses


def both(request, make, b=1):
    """The training on the CPU and the same elsewhere."""
    here = train(model(b), make)
    request.getfixturevalue("off_cpu")
    net = model(b)
    assert all(layer.is_elsewhere for layer in net if isinstance(layer, SparseLinear))
    return here, train(net, make)


def same(here, there):
    (_, _, patterns, losses), (trainer, _, others, again) = here, there
    assert trainer.updates > 0
    for step, (own, other) in enumerate(zip(patterns, others, strict=True)):
        assert own == other, step
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(again), rtol=1e-9, atol=0)


ALGORITHMS = {
    "deepr": ds.DeepR, "gmp": ds.GMP, "granet": ds.GraNet, "mest": ds.MEST, "rigl": ds.RigL,
    "set": ds.SET, "snfs": ds.SNFS, "topkast": ds.TopKAST,
}  # fmt: skip


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_makes_the_patterns_it_makes_on_the_cpu(request, name):
    assert {*ALGORITHMS, "static"} == {*BY_NAME}
    algorithm = ALGORITHMS[name]
    more = {"final_density": 0.1} if name in ("gmp", "granet") else {}
    same(*both(request, lambda net, optimizer: algorithm(net, optimizer, **TIMES, **more)))


@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize("regrow", [False, True])
@pytest.mark.parametrize("start", [0.0, 0.01, GradientStep(), lambda *_: torch.tensor(0.5)])
def test_rigl_and_its_rules(request, b, regrow, start):
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
def test_budgets_come_to_the_counts_of_the_cpu(request, make, b):
    same(*both(request, make, b))


def test_a_start_with_an_entry_for_every_slot(request):
    def few(layer, rewiring):
        return 0.01 * (rewiring.after.flat[rewiring.grown] + 1).double()

    def all_of_them(layer, rewiring):
        return 0.01 * (rewiring.after._flat_on(layer.values.device) + 1).double()

    runs = [train(model(), lambda *given: ds.RigL(*given, **TIMES, initial_value=few))]
    runs.append(train(model(), lambda *given: ds.RigL(*given, **TIMES, initial_value=all_of_them)))
    request.getfixturevalue("off_cpu")
    for start in (few, all_of_them):
        runs.append(train(model(), lambda *g, s=start: ds.RigL(*g, **TIMES, initial_value=s)))
    for other in runs[1:]:
        same(runs[0], other)


def backward(net):
    net.zero_grad()
    net(torch.randn(12, 16, dtype=next(net.parameters()).dtype)).square().mean().backward()


@pytest.mark.parametrize("make", [ds.RigL, ds.SNFS])
def test_grown_weights_that_start_with_nan_are_told_of_later_or_at_once(off_cpu, monkeypatch, make):
    """As a device finds out, who does not tell before it is asked."""
    monkeypatch.setattr(change, "_finite", lambda tensor: True)
    net = model(1, torch.float32)

    def start(layer, rewiring):
        values = torch.zeros(rewiring.after.nnz)
        values[0] = torch.nan if layer is net[0] else 0.0
        return values

    own = make(net, torch.optim.SGD(net.parameters(), lr=0.1), **TIMES, initial_value=start)
    first, second = net[0].pattern, net[2].pattern
    if make is ds.SNFS:  # changes sizes
        for _ in range(4):
            backward(net)
            own.step()
        backward(net)
        with pytest.raises(ValueError, match="layer '0': what grown weights start with held NaN"):
            own.step()
        assert (net[0].pattern, net[2].pattern) == (first, second)
        return
    for _ in range(9):
        backward(net)
        own.step()
    assert net[0].pattern == first
    assert net[2].pattern != second
    backward(net)
    with pytest.raises(ValueError, match="layer '0': what grown weights start with held NaN"):
        own.step()


def test_the_active_weights_keep_their_memory(off_cpu):
    net = model(4, torch.float32)
    own = ds.TopKAST(net, torch.optim.SGD(net.parameters(), lr=0.1), **TIMES)
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


def test_another_choice_between_forward_and_backward_is_refused(off_cpu):
    net = model(1, torch.float32)
    own = ds.TopKAST(net, torch.optim.SGD(net.parameters(), lr=0.1), **TIMES)
    y = net(torch.randn(12, 16))
    own._change_own(own._plan_own({}))
    with pytest.raises(RuntimeError, match="have changed between forward and backward"):
        y.sum().backward()


def test_weights_that_are_nan_are_told_of_by_topkast_later(off_cpu):
    net = model(1, torch.float32)
    own = ds.TopKAST(net, torch.optim.SGD(net.parameters(), lr=0.0), **TIMES, exploration=0.0)
    with torch.no_grad():
        net[2].values[1] = torch.nan

    def step():
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        own.step()

    for _ in range(9):
        step()
    with pytest.raises(ValueError, match=r"layer '2': .* held NaN .*at step 5"):
        step()


def test_growth_leaves_the_scores_that_it_went_by():
    pattern = ds.SparsePattern.random((16, 24), 0.2)
    pairs = [(torch.randn(5, 24), torch.randn(5, 16))]
    asked = [GrowthWanted("fc", pairs, pattern, 7, ranked=ranked) for ranked in (None, [])]
    plain, seen = GradientGrowth().choose_all(asked, 1)
    assert torch.equal(plain, seen)
    wanted = topk_outside(pairs, pattern, 7, sort=False)
    assert torch.equal(asked[1].ranked[0], wanted.scores)


@pytest.mark.parametrize("late", [False, True])
def test_records_and_telemetry_of_updates_that_come_late(off_cpu, monkeypatch, tmp_path, late):
    """They are what they are where updates come at once."""
    came = not late
    monkeypatch.setattr(Arriving, "is_there", property(lambda own: came))
    net = model(1, torch.float32)
    own = ds.RigL(net, torch.optim.SGD(net.parameters(), lr=0.1), **TIMES)
    recorder, telemetry = Recorder(tmp_path / "record"), Telemetry(own)
    recorder.start({name: layer.pattern for name, layer in own.layers.items()})
    own.on_update.append(recorder.update)
    patterns = [[layer.pattern for layer in own.layers.values()]]
    figures = []

    def files():
        return len([*(tmp_path / "record").glob("update-*.npz")])

    for _ in range(16):
        backward(net)
        if own.step() is not None:
            patterns.append([layer.pattern for layer in own.layers.values()])
            assert files() == (1 if late else len(patterns))
    assert recorder.holds_updates
    recorder.log(16, {"loss": 1.0})
    assert files() == (1 if late else 4)
    came = True
    recorder.log(16, {"loss": 1.0})
    assert files() == 4
    came = not late
    while own.steps < 20:
        backward(net)
        own.step()
    patterns.append([layer.pattern for layer in own.layers.values()])
    assert (recorder in unwritten) == late
    records = Records.load(tmp_path / "record")  # which waits
    assert recorder not in unwritten
    assert records.steps == [0, 5, 10, 15, 20]
    for i, ones in enumerate(patterns):
        assert [records.pattern(name, i) for name in own.layers] == ones
    figures = telemetry.figures()
    sets = [[{*p.flat.tolist()} for p in ones] for ones in patterns]
    left = sum(len(a - b) for a, b in zip(*sets[-2:], strict=True))
    assert figures["all/churn"] == left / sum(map(len, sets[-2]))
    ever = sum(len(set().union(*ones)) for ones in zip(*sets, strict=True))
    assert figures["all/exploration"] == ever / sum(p.total for p in patterns[0])


def test_a_state_is_never_ahead_of_its_record(off_cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(Arriving, "is_there", property(lambda own: False))
    net = model(1, torch.float32)
    own = ds.RigL(net, torch.optim.SGD(net.parameters(), lr=0.1), **TIMES)
    recorder = Recorder(tmp_path)
    recorder.start({name: layer.pattern for name, layer in own.layers.items()})
    own.on_update.append(recorder.update)
    for _ in range(5):
        backward(net)
        own.step()
    assert not (tmp_path / "update-000001.npz").exists()
    own.state_dict()
    assert (tmp_path / "update-000001.npz").exists()
    recorder.truncate(5, {name: layer.pattern for name, layer in own.layers.items()})


def test_everything_keeps_its_memory(off_cpu):
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


def test_an_update_that_would_rank_by_infinity_does_not_happen_and_is_told_of_later(off_cpu):
    net = model(1, torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    trainer = ds.RigL(net, optimizer, **TIMES)
    first, second = net[0].pattern, net[2].pattern

    def step(spoilt=False):
        optimizer.zero_grad()
        net(torch.randn(12, 16)).square().mean().backward()
        if spoilt:
            net[0].values.grad[3] = torch.inf
        return trainer.step()

    for _ in range(4):
        step()
    values = net[0].values.detach().clone()
    assert step(spoilt=True) is not None
    assert net[0].pattern == first
    assert net[2].pattern != second
    # The optimizer has taken its step with that gradient, as it would have without a trainer.
    assert torch.equal(net[0].values[:3], values[:3])
    for _ in range(4):
        step()
    line = r"layer '0': .* held NaN or infinity at step 5, .* did not happen"
    with pytest.raises(ValueError, match=line):
        step()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.nan_to_num_()
    assert step() is not None
    assert net[0].pattern != first


def test_a_change_of_size_is_refused_at_once(off_cpu):
    net = model(1, torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = ds.GMP(net, optimizer, **TIMES, final_density=0.1)
    for step in range(5):
        optimizer.zero_grad()
        net(torch.randn(12, 16)).square().mean().backward()
        if step == 4:
            net[0].values.grad[0] = torch.nan
            with pytest.raises(ValueError, match=r"layer '0': .* held NaN or infinity"):
                trainer.step()
        else:
            trainer.step()
    assert net[0].pattern.nnz == model().get_submodule("0").pattern.nnz


def test_copies_of_trainers_go_on(off_cpu):
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


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("regrow", [False, True])
@pytest.mark.parametrize("b", [1, 4])
def test_a_whole_update_waits_for_nothing(monkeypatch, without_cuda, b, regrow):
    """Tensors without memory refuse whoever asks for a number of theirs, as a host wait does."""
    # What this torch cannot do for devices it does not know, though no memory is touched.
    monkeypatch.setattr(torch.Tensor, "copy_", lambda own, new: torch._foreach_copy_([own], [new]))
    monkeypatch.setattr(SparseLinear, "reset_parameters", lambda *_: None)
    asked = []
    monkeypatch.setattr(plan_there, "ask", lambda *args: asked.append(args))
    like = ds.SparsePattern.random((64, 128), 0.2, block_size=b)
    with FakeTensorMode():
        held = torch.empty(like.nnz, dtype=torch.int64, device="cuda")
        first = ds.SparsePattern._on_device(held, like)
        layer = SparseLinear(128, 64, pattern=first, device="cuda")
        optimizer = torch.optim.Adam(layer.parameters(), capturable=True)
        trainer = ds.RigL(layer, optimizer, total_steps=9, update_interval=1, regrow_dropped=regrow)
        for _ in range(2):
            for parameter in layer.parameters():
                parameter.grad = torch.empty_like(parameter)
            x, dy = torch.empty(8, 128, device="cuda"), torch.empty(8, 64, device="cuda")
            for pairs in trainer._captures.values():
                pairs.append((x, dy))
            before = layer.pattern
            (rewiring,) = trainer.step().values()
            assert rewiring.before is before
            assert layer.pattern is rewiring.after
            assert not {"rows", "cols"} & set(vars(layer.pattern))
            assert asked.pop()[1].device == held.device
        with pytest.raises(RuntimeError):
            int(layer.index.row_ptr[0])  # what this test would notice


class Event:
    """What a device passes when it comes to it."""

    passed = False

    def query(self):
        return self.passed

    def synchronize(self):
        self.passed = True


def test_answers_that_have_not_arrived_are_waited_for_by_nobody():
    layers, event = {"fc": SparseLinear(4, 4, 0.5)}, Event()
    for answer in (torch.tensor(False), torch.tensor(True)):
        doubts.ask(layers["fc"], answer, "odd")
        doubts._open[layers["fc"]][-1].answer._event = event
    doubts.settle(layers)
    event.passed = True
    with pytest.raises(ValueError, match="layer 'fc': odd"):
        doubts.settle(layers)
    doubts.settle(layers)
    assert layers["fc"] not in doubts._open


def test_what_is_not_finite():
    good = [torch.ones(3), torch.zeros(0), torch.arange(4), torch.full((2,), 6e4).half()]
    assert not bool(doubts.not_finite(good))
    for bad in (torch.inf, -torch.inf, torch.nan):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            assert bool(doubts.not_finite([*good, torch.tensor([1.0, bad, 2.0], dtype=dtype)]))
