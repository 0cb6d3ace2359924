"""Checkpoints: exact resume in a new process, atomic writes, and rejection of bad files."""

import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from checkpoint_files import read_parts, write_parts
from states import copied, same
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.training import (
    SET,
    CheckpointError,
    RigL,
    load_checkpoint,
    save_checkpoint,
)


def make(algorithm=RigL, optimizer=torch.optim.Adam, block_size=1, hidden=24, **options):
    g = torch.Generator().manual_seed(5)
    model = nn.Sequential(
        SparseLinear(16, hidden, density=0.3, generator=g, block_size=block_size),
        nn.ReLU(),
        nn.Dropout(0.2),  # draws from the global generator
        SparseLinear(hidden, 4, density=0.5, generator=g),
    )
    opt = optimizer(model.parameters(), lr=0.01)
    trainer = algorithm(model, opt, total_steps=40, update_interval=5, **options)
    return model, opt, trainer, torch.optim.lr_scheduler.CosineAnnealingLR(opt, 40)


def epoch(model, opt, trainer, scheduler, data, steps=20):
    for _ in range(steps):
        opt.zero_grad()
        x = torch.randn(8, 16, generator=data) * random.random() + float(np.random.rand())
        model(x).square().mean().backward()
        trainer.step()
        scheduler.step()


def seed_all():
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    return torch.Generator().manual_seed(4)


def save(path, parts, data=None, **options):
    model, opt, trainer, scheduler = parts
    save_checkpoint(
        path, model=model, optimizer=opt, trainer=trainer, lr_scheduler=scheduler,
        generators={"data": data} if data is not None else None, **options,
    )  # fmt: skip


def load(path, parts, data=None):
    model, opt, trainer, scheduler = parts
    return load_checkpoint(
        path, model=model, optimizer=opt, trainer=trainer, lr_scheduler=scheduler,
        generators={"data": data} if data is not None else None,
    )  # fmt: skip


def snapshot(parts):
    """Return a copy of the complete state of a training."""
    model, opt, trainer, scheduler = parts
    states = [part.state_dict() for part in (model, opt, trainer, scheduler)]
    patterns = [layer.pattern.flat for layer in trainer.layers.values()]
    numbers = np.random.get_state()[1].tolist()
    return copied([states, patterns, torch.get_rng_state(), random.getstate(), numbers])


ALGORITHMS = {"rigl": RigL, "set": SET}

RESUME = """
import sys, torch
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]
import {module} as t
parts = t.make(t.ALGORITHMS[sys.argv[2]])
data = torch.Generator()
assert t.load(sys.argv[3], parts, data) == {{"epoch": 1}}
t.epoch(*parts, data)
t.save(sys.argv[4], parts, data)
""".format(module=__name__.rpartition(".")[2])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_resume_in_a_new_process_is_exact(tmp_path, algorithm):
    parts, data = make(ALGORITHMS[algorithm]), seed_all()
    epoch(*parts, data)  # ends on an update step
    save(tmp_path / "one", parts, data, extra={"epoch": 1})
    epoch(*parts, data)
    expected = snapshot(parts)

    here = os.path.dirname(__file__)
    subprocess.run(
        [sys.executable, "-c", RESUME, here, algorithm, tmp_path / "one", tmp_path / "two"],
        check=True,
    )
    other, other_data = make(ALGORITHMS[algorithm]), torch.Generator()
    load(tmp_path / "two", other, other_data)
    assert same(snapshot(other), expected)
    assert torch.equal(other_data.get_state(), data.get_state())
    assert other[2].steps == 40


OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam", "Muon")  # for other gradients and parameters
}


class AdamWithAttribute(torch.optim.Adam):
    """As bitsandbytes' optimizers: loading takes what __init__ has made."""

    def __init__(self, parameters, lr, **options):
        super().__init__(parameters, lr=lr, **options)
        self.loads = [0]

    def load_state_dict(self, state_dict):
        self.loads[0] += 1
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("kind", [*OPTIMIZERS.values(), AdamWithAttribute])
def test_every_optimizer_resumes_exactly(tmp_path, kind):
    def run(model, optimizer, steps):
        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(steps):
            x = torch.randn(8, 16)
            optimizer.step(closure)

    (model, optimizer), (resumed, other) = ((m, kind(m.parameters(), lr=0.01)) for m in models())
    run(model, optimizer, 3)
    save_checkpoint(tmp_path / "c", model=model, optimizer=optimizer)
    run(model, optimizer, 3)
    load_checkpoint(tmp_path / "c", model=resumed, optimizer=other)
    run(resumed, other, 3)
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


def models():
    return make()[0], make()[0]


def test_failing_load_of_an_optimizer_changes_nothing(saved):
    """What it did before it failed is undone, in the optimizers that it holds as well."""

    class Failing(torch.optim.Adam):
        def load_state_dict(self, state_dict):
            self.inner.load_state_dict(state_dict)
            self.state.clear()
            self.param_groups[0]["lr"] = self.new = 1.0
            raise KeyError("missing")

    Failing.__name__ = "Adam"
    parts = make(optimizer=Failing)
    model, optimizer = parts[:2]
    optimizer.inner = torch.optim.Adam(model.parameters(), lr=0.5)
    epoch(*parts, seed_all(), steps=3)
    attributes, groups = dict(vars(optimizer)), optimizer.param_groups
    check_rejected(saved, parts, "state of the optimizer is damaged .KeyError: 'missing'")
    assert vars(optimizer) == attributes
    assert optimizer.param_groups is groups
    assert optimizer.inner.param_groups[0]["lr"] == 0.5
    assert not optimizer.inner.state


def test_failing_load_of_a_scheduler_changes_nothing(saved):
    class Failing(torch.optim.lr_scheduler.CosineAnnealingLR):
        def load_state_dict(self, state_dict):
            super().load_state_dict({"T_max": 3, "new": 1})
            raise KeyError("missing")

    Failing.__name__ = "CosineAnnealingLR"
    model, optimizer, trainer, _ = make()
    parts = model, optimizer, trainer, Failing(optimizer, 40)
    epoch(*parts, seed_all(), steps=3)
    check_rejected(saved, parts, "missing")


def test_infinite_state_of_a_scheduler(tmp_path):
    """ReduceLROnPlateau has seen no metric: its best one is infinity."""
    model, optimizer, _, _ = make()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    parts = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
    save_checkpoint(tmp_path / "c", **parts)
    scheduler.step(1.0)
    load_checkpoint(tmp_path / "c", **parts)
    assert scheduler.best == float("inf")


def test_single_entry_of_any_stride(tmp_path):
    parts = make()
    entry = torch.arange(12.0).as_strided((1,), (11,), 3)
    save(tmp_path / "c", parts, extra={"a": entry})
    assert load(tmp_path / "c", parts)["a"].tolist() == [3.0]


def test_failed_background_save_does_not_stop_the_next(tmp_path, monkeypatch, caplog):
    parts = make()
    save(tmp_path / "good", parts)

    def fail(*_):
        raise OSError("no space left on device")

    for follow in (save, load):
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fail)
            saving = save_in_background(tmp_path / "bad", parts)
            while not saving.done:
                time.sleep(0.001)
        follow(tmp_path / "good", parts)
        assert f"could not save {tmp_path / 'bad'}: OSError: no space left" in caplog.text
        for _ in range(2):
            with pytest.raises(OSError, match="no space"):
                saving.wait()
        caplog.clear()


def save_in_background(path, parts):
    model, optimizer, _, _ = parts
    return save_checkpoint(path, model=model, optimizer=optimizer, wait=False)


def test_every_kind_of_generator(tmp_path):
    parts = make()
    generators = {
        "torch": torch.Generator().manual_seed(1),
        "pcg": np.random.default_rng(2),
        "philox": np.random.Generator(np.random.Philox(3)),
        "mt": np.random.Generator(np.random.MT19937(4)),
        "python": random.Random(5),
    }

    def draw():
        return [
            torch.rand(3, generator=generators["torch"]).tolist(),
            *(generators[n].random(3).tolist() for n in ("pcg", "philox", "mt")),
            generators["python"].random(),
        ]

    save_checkpoint(tmp_path / "c", model=parts[0], optimizer=parts[1], generators=generators)
    first = draw()
    assert draw() != first
    load_checkpoint(tmp_path / "c", model=parts[0], generators=generators)
    assert draw() == first


def test_load_model_only_without_random_state(tmp_path):
    parts, data = make(), seed_all()
    epoch(*parts, data)
    save(tmp_path / "c", parts)
    other = make()[0]
    torch.manual_seed(77)
    state = torch.get_rng_state()
    assert load_checkpoint(tmp_path / "c", model=other, random_state=False) == {}
    assert torch.equal(torch.get_rng_state(), state)
    assert other[0].pattern == parts[0][0].pattern
    for p, q in zip(other.parameters(), parts[0].parameters(), strict=True):
        assert torch.equal(p, q)


def test_names_that_a_wrapper_changed_are_explained(tmp_path):
    model, optimizer, *_ = make()
    save_checkpoint(tmp_path / "c", model=torch.compile(model), optimizer=optimizer)
    with pytest.raises(CheckpointError, match=r"put 'module\.' and '_orig_mod\.' before the names"):
        load_checkpoint(tmp_path / "c", model=model)
    with pytest.raises(CheckpointError, match=r"such as '[^']*', which is in the (file|model)$"):
        load_checkpoint(tmp_path / "c", model=nn.Linear(2, 2))


def test_unknown_generators_are_not_saved(tmp_path):
    parts = make()
    with pytest.raises(TypeError, match=r"expected a torch\.Generator, .* got int"):
        save(tmp_path / "c", parts, data=3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failing_write_keeps_the_previous_file(tmp_path, monkeypatch, call):
    parts = make()
    save(tmp_path / "c", parts, extra={"n": 1})
    before = (tmp_path / "c").read_bytes()

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="no space"):
        save(tmp_path / "c", parts, extra={"n": 2})
    assert (tmp_path / "c").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        save(tmp_path / "none" / "c", make())


@pytest.fixture
def saved(tmp_path):
    parts = make()
    epoch(*parts, seed_all())
    save(tmp_path / "c", parts)
    return tmp_path / "c"


def check_rejected(path, parts, message):
    """Check that loading raises a one-line error that matches, and changes nothing."""
    before = snapshot(parts)
    with pytest.raises(CheckpointError, match=message) as error:
        load(path, parts)
    assert "\n" not in str(error.value)
    assert same(snapshot(parts), before)


def damage(path, change):
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data))


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"", "is truncated or not a checkpoint"),
        (lambda d: b"PK\x03\x04 something else", "is truncated or not a checkpoint"),
        (lambda d: d[8:], "is truncated or not a checkpoint"),
        (lambda d: d[:10], "is truncated or not a checkpoint"),
        (lambda d: d[:-1], "is truncated or not a checkpoint"),
        (lambda d: d[: len(d) // 2], "is truncated or not a checkpoint"),
        (lambda d: d + b"x", "is truncated or not a checkpoint"),
        (lambda d: flipped(d, len(d) - 100), "SHA-256 does not match"),
        (lambda d: flipped(d, d.index(b"update_interval") + 19), "SHA-256 does not match"),
        (lambda d: flipped(d, d.index(b"dynsparse")), "is not a dynsparse checkpoint"),
    ],
)
def test_bad_files(saved, change, message):
    damage(saved, change)
    check_rejected(saved, make(), message)


def test_foreign_files(tmp_path):
    ds.save_safetensors(make()[0], tmp_path / "weights")
    check_rejected(tmp_path / "weights", make(), "is not a dynsparse checkpoint")
    torch.save({"model": {}}, tmp_path / "pickled")
    check_rejected(tmp_path / "pickled", make(), "is truncated or not a checkpoint")


def test_checkpoint_of_another_training(saved, tmp_path):
    check_rejected(
        saved, make(hidden=20), r"layer '0' was saved with .* the model has \[20, 16, 1, 96\]"
    )
    check_rejected(saved, make(block_size=2), "layer '0' was saved with")
    check_rejected(saved, make(optimizer=torch.optim.SGD), "holds the state of Adam, not of SGD")
    check_rejected(saved, make(SET), "its algorithm is 'RigL', here it is 'SET'")
    check_rejected(saved, make(drop_fraction=0.1), "its drop_fraction is")
    check_rejected(saved, make(pooling="max"), "its pooling is 'sum', here it is 'max'")
    model, opt, trainer, scheduler = make()
    check_rejected(
        saved, (nn.Sequential(model, nn.Linear(2, 2)), opt, trainer, scheduler), "only one of"
    )
    double = make()
    double[0].double()
    check_rejected(saved, double, r"saved as torch\.float32 .* the model has torch\.float64")
    groups = torch.optim.Adam([{"params": [p]} for p in model.parameters()])
    check_rejected(saved, (model, groups, trainer, scheduler), "saved with groups of")
    other = torch.optim.lr_scheduler.StepLR(opt, 3)
    check_rejected(saved, (model, opt, trainer, other), "CosineAnnealingLR, not of StepLR")

    save_checkpoint(tmp_path / "bare", model=model, optimizer=opt)
    check_rejected(tmp_path / "bare", (model, opt, trainer, scheduler), "saved without a trainer")
    with pytest.raises(CheckpointError, match="saved without a lr_scheduler"):
        load_checkpoint(tmp_path / "bare", model=model, lr_scheduler=scheduler)
    with pytest.raises(CheckpointError, match="holds no generator 'data'"):
        load_checkpoint(saved, model=model, generators={"data": torch.Generator()})
    save(tmp_path / "data", make(), torch.Generator())
    with pytest.raises(CheckpointError, match="generator 'data' was of another kind"):
        load_checkpoint(tmp_path / "data", model=model, generators={"data": random.Random()})


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none", make())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_nonfinite_optimizer_state_is_neither_saved_nor_loaded(saved, tmp_path, key, bad):
    """Saving it would replace a good checkpoint; loading it would give NaN weights."""
    parts = make()
    epoch(*parts, seed_all())
    before = saved.read_bytes()
    parts[1].state[parts[0][3].values][key].view(-1)[1] = bad
    with pytest.raises(ValueError, match=rf"{key} of '3.values' holds NaN or infinity"):
        save(saved, parts)
    assert saved.read_bytes() == before
    payload = read_parts(saved)
    numbers = payload["optimizer"]["state"]["state"]
    place = next(n for n, p in enumerate(parts[0].parameters()) if p is parts[0][3].values)
    numbers[place][key].view(-1)[1] = bad
    write_parts(saved, payload)
    check_rejected(saved, make(), rf"{key} of '3.values' holds NaN or infinity")


def recursive_list():
    made = []
    made.append(made)
    return made


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        (lambda: bytearray(b"abc"), TypeError, "found <class 'bytearray'> at /extra/a"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            TypeError,
            r"no tensors of torch\.qint8",
        ),
        (recursive_list, ValueError, "holds itself"),
    ],
)
def test_unloadable_values_are_not_saved(tmp_path, extra, error, message):
    model, optimizer, _, _ = make()
    with pytest.raises(error, match=message) as caught:
        save_checkpoint(tmp_path / "c", model=model, optimizer=optimizer, extra={"a": extra()})
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    model.register_buffer("odd", torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match=r"no tensors of torch\.float32, torch\.sparse_coo"):
        save_checkpoint(tmp_path / "c", model=model, optimizer=optimizer)
    assert not list(tmp_path.iterdir())


def test_background_saves_share_one_process_group():
    from dynsparse.ranks import GroupRanks
    from dynsparse.training.checkpoint.save_load import _cpu_ranks

    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        # Of other backends than gloo, each save makes new ranks of the same group.
        first, second = (_cpu_ranks(GroupRanks(dist.group.WORLD)) for _ in range(2))
        assert first is second
    finally:
        dist.destroy_process_group()
