"""Sparse training in Lightning equals a plain loop and resumes exactly."""

import logging
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dynsparse as ds
from dynsparse.nn import SparseLinear

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    lightning = pytest.importorskip("lightning.pytorch")
    from dynsparse.integrations.lightning import SparseCallback

pytestmark = pytest.mark.filterwarnings("default")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

OPTIONS = {"update_interval": 3, "drop_fraction": 0.5}


class Module(lightning.LightningModule):
    def __init__(self, seed=0, optimizers=1, block_size=2):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.first = SparseLinear(12, 16, 0.3, generator=g)
        self.second = SparseLinear(16, 4, 0.3, block_size=block_size, generator=g)
        self.dropout = nn.Dropout(0.2)
        self.count = optimizers

    def forward(self, x):
        return self.second(self.dropout(torch.relu(self.first(x))))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        made = [torch.optim.Adam(self.parameters(), 0.01) for _ in range(self.count)]
        return made[0] if self.count == 1 else made


def data(shuffle=True):
    g = torch.Generator().manual_seed(3)
    pairs = TensorDataset(torch.randn(40, 12, generator=g), torch.randint(4, (40,), generator=g))
    return DataLoader(pairs, 4, shuffle=shuffle)


def fit(module, callback, folder, epochs, *callbacks, **options):
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=[callback, *callbacks],
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options.pop("trainer", {}),
    )
    trainer.fit(module, data(), **options)
    return trainer


def same(first, second):
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


@pytest.mark.parametrize("accumulate", [1, 2])
def test_equals_a_plain_loop(tmp_path, accumulate):
    torch.manual_seed(1)
    module, callback = Module(), SparseCallback(ds.RigL, **OPTIONS)
    fit(module, callback, tmp_path, 2, trainer={"accumulate_grad_batches": accumulate})
    steps = 20 // accumulate
    assert callback.sparse_trainer.schedule.total_steps == steps
    assert callback.sparse_trainer.steps == steps
    assert callback.sparse_trainer.updates > 0

    torch.manual_seed(1)
    other = Module()
    optimizer = other.configure_optimizers()
    trainer = ds.RigL(other, optimizer, total_steps=steps, **OPTIONS)
    loader = data()
    for _ in range(2):
        for index, batch in enumerate(loader):
            (other.training_step(batch, index) / accumulate).backward()
            if (index + 1) % accumulate == 0:
                trainer.step()
                optimizer.zero_grad()
    same(module, other)


ALGORITHMS = {
    ds.RigL: OPTIONS,
    ds.SET: OPTIONS | {"seed": 4},
    ds.GMP: {"update_interval": 3, "final_density": 0.1},
    ds.GraNet: {"update_interval": 3, "final_density": 0.1, "scope": "layer"},
    ds.SNFS: {"update_interval": 3},
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_resuming_is_exact(tmp_path, algorithm):
    options = ALGORITHMS[algorithm] | {"total_steps": 40}
    block_size = 1 if algorithm is ds.SNFS else 2  # redistribution compares blocks of one size
    torch.manual_seed(1)
    whole = Module(block_size=block_size)
    fit(whole, SparseCallback(algorithm, **options), tmp_path, 4)

    torch.manual_seed(1)
    half = Module(block_size=block_size)
    first = fit(half, SparseCallback(algorithm, **options), tmp_path, 2)
    path = tmp_path / "half.ckpt"
    first.save_checkpoint(path)
    torch.manual_seed(99)
    resumed = Module(seed=7, block_size=block_size)
    callback = SparseCallback(algorithm, **options)
    fit(resumed, callback, tmp_path, 4, ckpt_path=path)
    assert callback.sparse_trainer.steps == 40
    same(whole, resumed)


def test_other_sizes_raise_where_layers_keep_theirs(tmp_path):
    fit(Module(), SparseCallback(ds.RigL), tmp_path, 1).save_checkpoint(tmp_path / "a.ckpt")
    other = Module()
    other.first = SparseLinear(12, 16, 0.2)
    with pytest.raises(ValueError, match="'first' had 38 blocks and the checkpoint has 58"):
        fit(other, SparseCallback(ds.RigL), tmp_path, 2, ckpt_path=tmp_path / "a.ckpt")
    assert not other.first.resizable


def test_bf16(tmp_path):
    module, callback = Module(), SparseCallback(ds.RigL, **OPTIONS)
    fit(module, callback, tmp_path, 2, trainer={"precision": "bf16-mixed"})
    assert callback.sparse_trainer.updates > 0
    assert all(p.isfinite().all() for p in module.parameters())


def test_unsupported_settings_raise(tmp_path):
    module = Module(optimizers=2)
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="follows one optimizer, configure_optimizers returned 2"):
        fit(module, SparseCallback(ds.RigL), tmp_path, 1)
    first = fit(Module(), SparseCallback(ds.RigL, **OPTIONS), tmp_path, 1)
    first.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="its algorithm is 'RigL', here it is 'SET'"):
        fit(Module(), SparseCallback(ds.SET, **OPTIONS), tmp_path, 2, ckpt_path=tmp_path / "a.ckpt")


class Log(lightning.loggers.logger.DummyLogger):
    def __init__(self):
        super().__init__()
        self.seen = {}

    def log_metrics(self, metrics, step=None):
        self.seen.setdefault(step, {}).update(metrics)


@pytest.mark.parametrize("telemetry", [True, False])
def test_updates_are_logged(tmp_path, telemetry):
    log = Log()
    callback = SparseCallback(ds.RigL, update_interval=4, telemetry=telemetry)
    trainer = lightning.Trainer(
        max_epochs=2, callbacks=[callback], accelerator="cpu", logger=log,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Module(), data())
    seen = {step: found for step, found in log.seen.items() if "sparse/churn" in found}
    assert list(seen) == ([4, 8, 12] if telemetry else [])
    for found in seen.values():
        assert 0 < found["sparse/churn"] <= 0.3
        assert found["sparse/density"] == pytest.approx(0.3, abs=0.01)
        assert found.keys() >= {"sparse/jaccard", "sparse/dead_inputs", "sparse/zero_outputs"}


def test_weight_averaging_follows_patterns(tmp_path):
    averaging = lightning.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)
    compared = []

    class Compare(lightning.Callback):
        def on_train_epoch_end(self, trainer, module):
            average = averaging._average_model
            compared.append(average.first.pattern == module.first.pattern)

    module = Module()
    first = module.first.pattern
    fit(module, SparseCallback(ds.RigL, **OPTIONS), tmp_path, 4, averaging, Compare())
    assert compared == [True] * 4
    assert module.first.pattern != first
