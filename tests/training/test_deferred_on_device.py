"""Results of an update that are read from the device later: errors, records and telemetry."""

import pytest
import torch
from device_trainings import TIMES, backward, model

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.pattern.on_device import HostCopy
from dynsparse.training import Telemetry, deferred_checks, update
from dynsparse.training.records import Recorder, Records
from dynsparse.training.records.files import pending_recorders


@pytest.mark.parametrize("make", [ds.RigL, ds.SNFS])
def test_nan_initial_values_raise_later_or_at_once(off_cpu, monkeypatch, make):
    """The check is deferred, unless the update changes sizes."""
    monkeypatch.setattr(update, "is_finite", lambda tensor: True)
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


def test_topkast_raises_for_nan_weights_later(off_cpu):
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


@pytest.mark.parametrize("late", [False, True])
def test_records_and_telemetry_of_deferred_updates(off_cpu, monkeypatch, tmp_path, late):
    """They equal those of updates that are read at once."""
    came = not late
    monkeypatch.setattr(HostCopy, "is_ready", property(lambda own: came))
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
    assert (recorder in pending_recorders) == late
    records = Records.load(tmp_path / "record")  # which waits
    assert recorder not in pending_recorders
    assert records.steps == [0, 5, 10, 15, 20]
    for i, ones in enumerate(patterns):
        assert [records.pattern(name, i) for name in own.layers] == ones
    figures = telemetry.figures()
    sets = [[{*p.flat.tolist()} for p in ones] for ones in patterns]
    left = sum(len(a - b) for a, b in zip(*sets[-2:], strict=True))
    assert figures["all/churn"] == left / sum(map(len, sets[-2]))
    ever = sum(len(set().union(*ones)) for ones in zip(*sets, strict=True))
    assert figures["all/exploration"] == ever / sum(p.total for p in patterns[0])


def test_state_dict_flushes_the_record(off_cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(HostCopy, "is_ready", property(lambda own: False))
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


def test_update_with_infinite_gradient_is_skipped_and_raises_later(off_cpu):
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


def test_change_of_size_with_nan_gradient_raises_at_once(off_cpu):
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


class Event:
    """A stand-in for a CUDA event."""

    passed = False

    def query(self):
        return self.passed

    def synchronize(self):
        self.passed = True


def test_pending_results_are_not_waited_for():
    layers, event = {"fc": SparseLinear(4, 4, 0.5)}, Event()
    for answer in (torch.tensor(False), torch.tensor(True)):
        deferred_checks.defer_checks([layers["fc"]], answer.view(1), "odd")
        deferred_checks._pending[layers["fc"]][-1][0]._event = event
    deferred_checks.raise_pending_errors(layers)
    event.passed = True
    with pytest.raises(ValueError, match="layer 'fc': odd"):
        deferred_checks.raise_pending_errors(layers)
    deferred_checks.raise_pending_errors(layers)
    assert layers["fc"] not in deferred_checks._pending


def test_any_not_finite():
    good = [torch.ones(3), torch.zeros(0), torch.arange(4), torch.full((2,), 6e4).half()]
    not_finite = deferred_checks.any_not_finite
    assert not_finite([good]).tolist() == [False]
    assert not_finite([[torch.zeros(0), torch.arange(4)]]).tolist() == [False]
    for bad in (torch.inf, -torch.inf, torch.nan):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            wrong = [*good, torch.tensor([1.0, bad, 2.0], dtype=dtype)]
            assert not_finite([good, wrong, good[:1], []]).tolist() == [False, True, False, False]
