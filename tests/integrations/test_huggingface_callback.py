"""Sparse training in the Hugging Face Trainer equals a plain loop and resumes exactly."""

import base64
import io
import warnings
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import dynsparse as ds
from dynsparse.nn import SparseLinear

pytest.importorskip("accelerate")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    transformers = pytest.importorskip("transformers")
    from dynsparse.integrations import huggingface
    from dynsparse.integrations.huggingface import SparseCallback

pytestmark = pytest.mark.filterwarnings("default")

OPTIONS = {"update_interval": 3, "drop_fraction": 0.5}


class Model(nn.Module):
    def __init__(self, seed=0, block_size=2):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.first = SparseLinear(12, 16, 0.3, generator=g)
        self.second = SparseLinear(16, 4, 0.3, block_size=block_size, generator=g)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x, labels=None):
        logits = self.second(self.dropout(torch.relu(self.first(x))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Data(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(3)
        self.x, self.labels = torch.randn(40, 12, generator=g), torch.arange(40) % 4

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.labels[i]}


def train(model, folder, callback, resume=None, data=None, **arguments):
    trainer = make(model, folder, callback, data, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def make(model, folder, callback, data=None, **arguments):
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 4,
        "learning_rate": 0.01,
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "use_cpu": True,
        "dataloader_num_workers": 0,
        "seed": 11,
    } | arguments
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(**options),
        train_dataset=data or Data(),
        callbacks=callback and [callback],
    )


def same(first, second):
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


@pytest.mark.parametrize("algorithm", [ds.RigL, ds.SET])
def test_resuming_is_exact(tmp_path, algorithm):
    options = OPTIONS | ({"seed": 4} if algorithm is ds.SET else {})
    whole, callback = Model(), SparseCallback(algorithm, **options)
    train(whole, tmp_path, callback, save_strategy="steps", save_steps=15)
    assert callback.sparse_trainer.steps == 40
    assert callback.sparse_trainer.schedule.total_steps == 40
    assert callback.sparse_trainer.updates > 3

    resumed, callback = Model(seed=7), SparseCallback(algorithm, **options)
    train(resumed, tmp_path / "other", callback, resume=str(tmp_path / "checkpoint-15"))
    assert callback.sparse_trainer.steps == 40
    same(whole, resumed)


RESIZING = {
    ds.GMP: {"final_density": 0.1},
    ds.GraNet: {"final_density": 0.1},
    ds.SNFS: {},
}


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("algorithm", RESIZING)
def test_resuming_is_exact_where_layers_change_size(tmp_path, algorithm, added):
    options = {"update_interval": 3} | RESIZING[algorithm]

    def run(model, callback, resume=None, **arguments):
        trainer = make(model, tmp_path, None if added else callback, **arguments)
        if added:
            callback.before_reporters(trainer)
        trainer.train(resume_from_checkpoint=resume)
        assert callback.sparse_trainer.steps == 40
        return model

    whole, callback = Model(block_size=1), SparseCallback(algorithm, **options)
    before = whole.first.pattern.nnz
    run(whole, callback, save_strategy="steps", save_steps=15)
    assert whole.first.pattern.nnz != before
    resumed, callback = Model(seed=7, block_size=1), SparseCallback(algorithm, **options)
    same(whole, run(resumed, callback, resume=str(tmp_path / "checkpoint-15")))


def test_other_sizes_raise_where_layers_keep_theirs(tmp_path):
    train(Model(), tmp_path, SparseCallback(ds.RigL), save_strategy="steps", save_steps=15)
    other = Model()
    other.first = SparseLinear(12, 16, 0.2)
    with pytest.raises(ValueError, match="'first' had 38 blocks and the checkpoint has 58"):
        train(other, tmp_path / "b", SparseCallback(ds.RigL), str(tmp_path / "checkpoint-15"))
    assert not other.first.resizable


def test_equals_a_plain_loop(tmp_path):
    model, callback = Model().eval(), SparseCallback(ds.RigL, **OPTIONS)
    model.dropout = nn.Identity()
    seen = []
    callback_model = model.forward

    def forward(x, labels=None):
        seen.append((x.clone(), labels.clone()))
        return callback_model(x, labels)

    model.forward = forward
    trainer = train(
        model, tmp_path, callback, gradient_accumulation_steps=2, max_grad_norm=0.0,
        lr_scheduler_type="constant", optim="adamw_torch",
    )  # fmt: skip
    assert callback.sparse_trainer.steps == 20
    group = trainer.optimizer.param_groups[0]
    other = Model()
    other.dropout = nn.Identity()
    optimizer = torch.optim.AdamW(
        other.parameters(), 0.01, group["betas"], group["eps"], weight_decay=0.0
    )
    plain = ds.RigL(other, optimizer, total_steps=20, **OPTIONS)
    for index, (x, labels) in enumerate(seen):
        (other(x, labels)["loss"] / 2).backward()
        if index % 2:
            plain.step()
            optimizer.zero_grad()
    for layer in ("first", "second"):
        assert getattr(model, layer).pattern == getattr(other, layer).pattern
        torch.testing.assert_close(getattr(model, layer).values, getattr(other, layer).values)


def test_pruned_model_with_sparse_vocabulary(tmp_path):
    """With gradient accumulation, activation checkpointing, bfloat16 and a resume."""
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=8)
    names = ["transformer.h", "transformer.wte", "lm_head"]

    class Text(Data):
        def __getitem__(self, i):
            ids = (torch.arange(8) + i) % 32
            return {"input_ids": ids, "labels": ids}

    def run(resume=None):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        ds.sparsify(model, 0.3, start="magnitude", include=names, verbose=False)
        callback = SparseCallback(ds.RigL, **OPTIONS)
        patterns = {n: m.pattern for n, m in model.named_modules() if isinstance(m, SparseLinear)}
        train(model, tmp_path, callback, resume, Text(), gradient_checkpointing=True, bf16=True,
              gradient_accumulation_steps=2, save_strategy="steps", save_steps=10)  # fmt: skip
        assert callback.sparse_trainer.updates > 3
        for name, layer in model.named_modules():
            if isinstance(layer, SparseLinear):
                assert layer.pattern.nnz == patterns[name].nnz
                assert layer.pattern != patterns[name], name
        return model

    model = run()
    resumed = run(str(tmp_path / "checkpoint-10"))
    assert resumed.lm_head.table is resumed.transformer.wte
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], tensor, msg=name)


def test_unsupported_settings_raise(tmp_path):
    train(Model(), tmp_path, SparseCallback(ds.RigL), save_strategy="steps", save_steps=15)
    checkpoint = str(tmp_path / "checkpoint-15")
    with pytest.raises(ValueError, match="its algorithm is 'RigL', here it is 'SET'"):
        train(Model(), tmp_path / "b", SparseCallback(ds.SET), resume=checkpoint)
    with pytest.raises(ValueError, match="leave restore_callback_states_from_checkpoint at False"):
        train(
            Model(), tmp_path / "b", SparseCallback(ds.RigL), resume=checkpoint,
            restore_callback_states_from_checkpoint=True,
        )  # fmt: skip
    state = tmp_path / "checkpoint-15" / "trainer_state.json"
    state.write_text(state.read_text().replace("SparseCallback", "OtherCallback"))
    with pytest.raises(ValueError, match="the checkpoint was saved without SparseCallback"):
        train(Model(), tmp_path / "b", SparseCallback(ds.RigL), resume=checkpoint)


def test_damaged_state_raises():
    raw = io.BytesIO()
    torch.save({"x": torch.zeros(1000)}, raw)
    content = raw.getvalue()
    assert huggingface._decode(base64.b64encode(content).decode()).keys() == {"x"}
    with pytest.raises(ValueError, match="SparseCallback in the checkpoint is damaged"):
        huggingface._decode(base64.b64encode(content[:-60]).decode())


class Reporter(transformers.TrainerCallback):
    """A reporter like TensorBoard's and wandb's, which Trainer creates from `report_to`."""

    seen: ClassVar[list] = []

    def on_log(self, args, state, control, logs=None, **parts):
        self.seen.append(dict(logs))


@pytest.mark.parametrize("given", [True, False])
def test_reporters_get_logged_figures(tmp_path, monkeypatch, given):
    known = transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK
    monkeypatch.setitem(known, "mine", Reporter)
    monkeypatch.setattr(Reporter, "seen", [])
    options = {"report_to": ["mine"], "logging_strategy": "steps", "logging_steps": 10}
    callback = SparseCallback(ds.RigL, **OPTIONS)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=20, use_cpu=True, disable_tqdm=True, save_strategy="no", **options
    )
    trainer = transformers.Trainer(
        Model(), arguments, train_dataset=Data(), callbacks=[callback] if given else []
    )
    callback.before_reporters(trainer)
    assert [type(one) for one in trainer.callback_handler.callbacks].count(SparseCallback) == 1
    trainer.train()
    entries = [entry for entry in Reporter.seen if "loss" in entry]
    assert len(entries) == 2
    for entry, kept in zip(entries, trainer.state.log_history, strict=False):
        assert entry["sparse/density"] == kept["sparse/density"]
        assert {name for name in entry if name.startswith("sparse/")} == set(
            callback._follower.figures()
        )


@pytest.mark.parametrize("telemetry", [True, False])
def test_logs_contain_figures_of_updates(tmp_path, telemetry):
    callback = SparseCallback(ds.RigL, **OPTIONS, telemetry=telemetry)
    trainer = train(Model(), tmp_path, callback, logging_strategy="steps", logging_steps=10)
    entries = [e for e in trainer.state.log_history if "loss" in e]
    assert len(entries) == 4
    for entry in entries:
        assert ("sparse/density" in entry) == telemetry
        if telemetry:
            figures = callback._follower.telemetry.figures()
            assert entry["sparse/density"] == figures["all/density"]
            assert 0 < entry["sparse/churn"] < 1
