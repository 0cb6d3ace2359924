"""The constants that choose kernels: a training's state keeps them, a long one measures them."""

import itertools
import logging

import pytest
import torch

import dynsparse as ds
from dynsparse import native
from dynsparse.files.cache import open_cache
from dynsparse.ops.linear import choice, in_force, measured, tables
from dynsparse.ops.linear.costs import Table
from dynsparse.ops.linear.tuning import run
from dynsparse.ops.linear.tuning.cells import Cell
from dynsparse.training import kernel_costs
from dynsparse.training.checkpoint import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.skipif(native.load() is None, reason="the compiled kernels are not built")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(kernel_costs, "_first", kernel_costs._First())
    choice.put_in_force(None)
    yield
    choice.put_in_force(None)


def training(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(ds.nn.SparseLinear(64, 96, 0.4), ds.nn.SparseLinear(96, 10, 0.4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, ds.SET(model, optimizer, total_steps=400, update_interval=5, seed=1)


def steps(model, trainer, count):
    for i in range(count):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(i))
        trainer.optimizer.zero_grad()
        model(x).square().mean().backward()
        trainer.step()


def measured_here():
    """As if it had been measured: everything but dense products takes long."""
    own = tables.shipped()
    slow = {
        name: tuple(one._replace(call=one.call if name == "dense" else 1e8) for one in both)
        for name, both in own.costs.items()
    }
    return Table("this one", "measured here on 2026-01-31", slow, measured_here=True)


def test_a_training_goes_on_with_the_constants_it_had():
    choice.put_in_force(measured_here())
    model, trainer = training()
    assert model[0].kernel(32) == "dense"
    state = trainer.state_dict()
    choice.put_in_force(tables.shipped())
    other_model, other = training()
    assert other_model[0].kernel(32) != "dense"
    other.load_state_dict(state)
    assert in_force.table() == measured_here()
    assert other_model[0].kernel(32) == "dense"


def test_one_that_began_with_the_librarys_stays_with_them():
    model, trainer = training()
    state = trainer.state_dict()
    assert state["kernel_costs"] == {"table": tables.shipped().name}
    choice.put_in_force(measured_here())
    assert model[0].kernel(32) == "dense"
    trainer.load_state_dict(state)
    assert in_force.table() == tables.shipped()
    choice.put_in_force(measured_here())
    trainer.load_state_dict({k: v for k, v in state.items() if k != "kernel_costs"})
    assert in_force.table() == tables.shipped()


def test_what_another_machine_measured_stays_there(monkeypatch):
    choice.put_in_force(measured_here())
    _, trainer = training()
    state = trainer.state_dict()
    choice.put_in_force(tables.shipped())
    here = measured.here()
    monkeypatch.setattr(measured, "here", lambda: here | {"processor": "another"})
    trainer.load_state_dict(state)
    assert in_force.table() == tables.shipped()


@pytest.mark.parametrize(
    "told", [3, {}, {"table": 1}, {"table": "a", "costs": {}}, {"table": "a", "costs": None}]
)
def test_a_damaged_state_changes_nothing(told):
    choice.put_in_force(measured_here())
    _, trainer = training()
    state = trainer.state_dict() | {"kernel_costs": told, "steps": 7}
    with pytest.raises(ValueError, match="expected"):
        trainer.load_state_dict(state)
    assert (trainer.steps, in_force.table()) == (0, measured_here())


def test_a_checkpoint_takes_them_along(tmp_path):
    choice.put_in_force(measured_here())
    model, trainer = training()
    steps(model, trainer, 3)
    save_checkpoint(tmp_path / "c", model=model, optimizer=trainer.optimizer, trainer=trainer)
    choice.put_in_force(tables.shipped())
    other, its = training(seed=1)
    load_checkpoint(tmp_path / "c", model=other, optimizer=its.optimizer, trainer=its)
    assert in_force.table() == measured_here()
    steps(model, trainer, 9)
    steps(other, its, 9)
    for one, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, wanted)


def test_ranks_begin_with_the_librarys():
    class Two:
        alone = False

    choice.put_in_force(measured_here())
    kernel_costs.begin_with(Two())
    assert in_force.table() == tables.shipped()
    choice.put_in_force(measured_here())
    kernel_costs.go_on_with(Two(), kernel_costs.told())
    assert in_force.table() == tables.shipped()


# The first measurement.


@pytest.fixture
def long(tmp_path, monkeypatch):
    """Every training is one, and two cells are all."""
    monkeypatch.setenv("DYNSPARSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DYNSPARSE_CACHE_SIZE", str(1 << 20))
    monkeypatch.setattr(kernel_costs, "_STEPS", 5)
    monkeypatch.setattr(kernel_costs, "_SECONDS", 0.0)
    monkeypatch.setattr(kernel_costs, "_SHARE", 1e9)
    monkeypatch.setattr(run, "QUICK", (Cell(32, 48, 1, 0.3, 4), Cell(32, 32, 4, 0.3, 4)))


def trained(count):
    model, trainer = training()
    steps(model, trainer, count)
    return [one.detach().clone() for one in model.parameters()]


def test_the_first_long_training_measures_and_its_bits_stay(long, caplog, monkeypatch):
    with caplog.at_level(logging.INFO, "dynsparse"):
        found = trained(40)
    assert sum("the kernels were measured in" in one for one in caplog.messages) == 1
    kept = measured.kept_measured()
    assert kept is not None
    assert not kept.asked
    before = in_force.table()
    assert not before.measured_here
    monkeypatch.setenv("DYNSPARSE_TUNE", "off")
    choice.put_in_force(None)
    for one, wanted in zip(trained(40), found, strict=True):
        assert torch.equal(one, wanted)


@pytest.mark.parametrize("variable", ["off", "load"])
def test_the_environment_switches_it_off(long, monkeypatch, variable):
    monkeypatch.setenv("DYNSPARSE_TUNE", variable)
    trained(40)
    assert open_cache().kinds() == {}


def test_a_short_training_measures_nothing(long):
    trained(4)
    assert kernel_costs._first._tuning is None


def test_what_was_measured_before_is_not_measured_again(long, monkeypatch):
    trained(40)
    monkeypatch.setattr(kernel_costs, "_first", kernel_costs._First())
    monkeypatch.setattr(run.Tuning, "step", lambda self: pytest.fail("measured again"))
    trained(40)


def test_without_a_cache_nothing_is_measured(long, monkeypatch):
    monkeypatch.setenv("DYNSPARSE_CACHE_SIZE", "0")
    trained(10)
    assert kernel_costs._first.over
    assert kernel_costs._first._tuning is None


def test_an_error_ends_the_measurement_and_not_the_training(long, monkeypatch, caplog):
    def broken(self):
        raise RuntimeError("no memory")

    monkeypatch.setattr(run.Tuning, "step", broken)
    with caplog.at_level(logging.INFO, "dynsparse"):
        trained(10)
    assert sum("were not measured: no memory" in one for one in caplog.messages) == 1


def test_pauses_take_a_share_of_the_time(long, monkeypatch):
    """A clock that a step takes a second of, and a pause three."""
    now = [0.0]
    monkeypatch.setattr(kernel_costs.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(kernel_costs, "_SHARE", 0.05)
    pauses = []

    def pause(self):
        pauses.append(now[0])
        now[0] += 3.0
        return True

    monkeypatch.setattr(run.Tuning, "step", pause)
    for _ in range(300):
        now[0] += 1.0
        kernel_costs._first.step(training_layers())
    assert 4 <= len(pauses) <= 6
    assert all(b - a >= 59 for a, b in itertools.pairwise(pauses))


def training_layers():
    return {"a": ds.nn.SparseLinear(4, 4, 0.5)}
