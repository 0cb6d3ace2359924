"""Resuming is exact, also of the loss scale, the record and the log."""

import pytest
import torch
from rich.console import Console
from saved_states import assert_equal, state

from dynsparse.apps.common import training
from dynsparse.apps.common.resume import find_checkpoint
from dynsparse.apps.image_classification import Training
from dynsparse.apps.image_classification.mnist import Options, run
from dynsparse.training.records import Records

QUIET = Console(quiet=True)
TINY = {"batch_size": 64, "hidden_sizes": (32,), "steps_per_epoch": 4, "epochs": 2, "seed": 7}


def tiny(**changes):
    return run(Options(**{**TINY, **changes}), QUIET)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": "set", "optimizer": "Momentum", "permute_input": "random"},
        {"method": "static", "optimizer": "GradientDescent", "data_type": "bfloat16"},
        {"block_size": 8, "pooling_type": "AVG", "permute_input": "block"},
        {"data_type": "float16", "loss_scale": 512.0},
    ],
    ids=str,
)
def test_resume_is_exact(tmp_path, changes):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    expected = tiny(checkpoint_path=whole, **changes)
    tiny(checkpoint_path=halves, stop_after=1, **changes)
    torch.manual_seed(99)
    got = tiny(checkpoint_path=halves, restore=halves, **changes)
    assert_equal(state(whole / "epoch-0002.ckpt"), state(halves / "epoch-0002.ckpt"))
    for key in ("accuracy", "loss", "updates", "replaced", "steps", "epochs"):
        assert got[key] == expected[key]


@pytest.mark.slow
def test_loss_scale_is_resumed(tmp_path, monkeypatch):
    """The scale grows every 3 steps until gradients overflow; the record continues, too."""
    monkeypatch.setattr(training, "_FIRST_SCALE", 2.0**33)
    settings = torch.amp.GradScaler.__init__.__defaults__
    often = (*settings[:-2], 3, settings[-1])  # growth_interval
    monkeypatch.setattr(torch.amp.GradScaler.__init__, "__defaults__", often)
    half = {"data_type": "float16", "method": "snfs", "update_interval": 1, "epochs": 3}
    expected = tiny(checkpoint_path=tmp_path / "a", records_path=tmp_path / "rec", **half)
    assert 5 < expected["skipped"] < expected["steps"] / 2
    assert expected["updates"] <= expected["steps"] - expected["skipped"]
    record = Records.load(tmp_path / "rec")
    first = tmp_path / "a" / "epoch-0001.ckpt"
    got = tiny(restore=first, checkpoint_path=tmp_path / "b", records_path=tmp_path / "rec", **half)
    assert_equal(
        state(tmp_path / "a" / "epoch-0003.ckpt"), state(tmp_path / "b" / "epoch-0003.ckpt")
    )
    assert (got["loss"], got["skipped"]) == (expected["loss"], expected["skipped"])
    again = Records.load(tmp_path / "rec")
    assert again.steps == record.steps
    assert again.pattern("fc1", -1) == record.pattern("fc1", -1)


def test_record_and_log_continue(tmp_path):
    outputs = {"records_path": tmp_path / "rec", "log": tmp_path / "log.txt"}
    tiny(checkpoint_path=tmp_path / "a", **outputs)
    expected = Records.load(tmp_path / "rec")
    patterns = [p for _, p in expected.patterns("fc1")]
    # Back to the first epoch: what the record says of the second is forgotten and made anew.
    tiny(restore=tmp_path / "a" / "epoch-0001.ckpt", records_path=tmp_path / "rec")
    again = Records.load(tmp_path / "rec")
    assert again.steps == expected.steps
    assert [p for _, p in again.patterns("fc1")] == patterns
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 1 + 2 * 5


def test_default_flags_come_from_the_checkpoint(tmp_path):
    tiny(checkpoint_path=tmp_path, stop_after=1, densities=(0.2, 1.0), droprate=0.3)
    figures = run(Options(restore=tmp_path), QUIET)
    assert figures["epochs"] == 2
    assert figures["seed"] == 7
    assert figures["layers"][0]["density"] == pytest.approx(0.2, abs=1e-4)


def test_testing_a_checkpoint_changes_nothing(tmp_path):
    trained = tiny(checkpoint_path=tmp_path)
    before = sorted(tmp_path.iterdir())
    tested = run(Options(restore=tmp_path, test_mode="tests", checkpoint_path=tmp_path), QUIET)
    assert tested["accuracy"] == trained["accuracy"]
    assert tested["train_loss"] is None
    assert sorted(tmp_path.iterdir()) == before


def test_checkpoint_frequency_and_the_newest(tmp_path):
    tiny(checkpoint_path=tmp_path, epochs=5, checkpoint_freq=2)
    names = sorted(f.name for f in tmp_path.iterdir())
    assert names == ["epoch-0002.ckpt", "epoch-0004.ckpt", "epoch-0005.ckpt"]
    assert find_checkpoint(Training, tmp_path).name == "epoch-0005.ckpt"
    assert find_checkpoint(Training, tmp_path / "epoch-0002.ckpt").name == "epoch-0002.ckpt"
    (tmp_path / "epoch-12345.ckpt").touch()
    (tmp_path / "epoch-99999.ckpt.tmp").touch()
    assert find_checkpoint(Training, tmp_path).name == "epoch-12345.ckpt"
