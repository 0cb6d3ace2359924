"""A training never resumes from or deletes checkpoints and records of other trainings."""

import shutil
from pathlib import Path

import pytest
from rich.console import Console

from dynsparse.apps.image_classification import mnist
from dynsparse.training.records import Records

QUIET = Console(quiet=True)
TINY = {"batch_size": 512, "hidden_sizes": (16,), "steps_per_epoch": 1, "epochs": 3, "seed": 1}


def tiny(**changes):
    return mnist.run(mnist.Options(**{**TINY, **changes}), QUIET)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def refused(match: str, **changes) -> None:
    with pytest.raises(ValueError, match=match) as error:
        tiny(**changes)
    assert "\n" not in str(error.value)


def test_folder_with_checkpoints_of_another_training_raises(tmp_path):
    tiny(checkpoint_path=tmp_path)
    before = contents(tmp_path)
    refused(r"got .*epoch-0003\.ckpt: go on with that one by --restore", checkpoint_path=tmp_path)
    assert contents(tmp_path) == before
    # Neither does one that was begun elsewhere go on there.
    tiny(checkpoint_path=tmp_path / "b", stop_after=1, seed=2)
    refused("--overwrite", restore=tmp_path / "b", checkpoint_path=tmp_path, seed=2)
    shutil.rmtree(tmp_path / "b")
    assert contents(tmp_path) == before


def test_overwrite_removes_the_earlier_training(tmp_path):
    outputs = {"checkpoint_path": tmp_path / "c", "records_path": tmp_path / "r"}
    tiny(**outputs)
    tiny(**outputs, seed=2, stop_after=1, overwrite=True)
    assert [file.name for file in (tmp_path / "c").iterdir()] == ["epoch-0001.ckpt"]
    assert Records.load(tmp_path / "r").metadata["seed"] == 2
    resumed = mnist.run(mnist.Options(restore=tmp_path / "c", **outputs), QUIET)
    assert resumed["seed"] == 2
    assert len(list((tmp_path / "c").iterdir())) == 3


def test_errors_are_raised_before_anything_is_deleted(tmp_path):
    tiny(checkpoint_path=tmp_path / "c", records_path=tmp_path / "r")
    before = contents(tmp_path / "c") | contents(tmp_path / "r")
    (tmp_path / "log").mkdir()
    with pytest.raises(OSError, match="log"):
        tiny(
            checkpoint_path=tmp_path / "c", records_path=tmp_path / "r", overwrite=True,
            log=tmp_path / "log",
        )  # fmt: skip
    assert contents(tmp_path / "c") | contents(tmp_path / "r") == before


def test_existing_record_raises(tmp_path):
    tiny(records_path=tmp_path / "r")
    before = contents(tmp_path / "r")
    refused("expected a folder without the record of another", records_path=tmp_path / "r", seed=2)
    assert contents(tmp_path / "r") == before
    tiny(records_path=tmp_path / "r", seed=2, overwrite=True)
    assert Records.load(tmp_path / "r").metadata["seed"] == 2


def test_record_of_another_training_raises(tmp_path):
    tiny(records_path=tmp_path / "r", checkpoint_path=tmp_path / "a", stop_after=1)
    tiny(checkpoint_path=tmp_path / "b", stop_after=1, seed=2)
    before = contents(tmp_path / "r")
    refused("other patterns", restore=tmp_path / "b", records_path=tmp_path / "r", seed=2)
    assert contents(tmp_path / "r") == before


def test_record_without_all_updates_raises_before_the_first_step(tmp_path):
    tiny(records_path=tmp_path / "r", checkpoint_path=tmp_path / "a")
    (tmp_path / "r" / "update-000002.npz").unlink()
    before = contents(tmp_path / "r")
    newest = {"restore": tmp_path / "a", "records_path": tmp_path / "r"}
    refused("it holds other patterns: restore an earlier checkpoint", **newest)
    assert contents(tmp_path / "r") == before


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04"], ids=["emptied", "cut"])
def test_damaged_update_after_the_checkpoint_is_ignored(tmp_path, content):
    """As after a power failure: the checkpoint does not need the newest update."""
    expected = tiny(checkpoint_path=tmp_path / "whole", records_path=tmp_path / "r")
    patterns = [pattern for _, pattern in Records.load(tmp_path / "r").patterns("fc1")]
    (tmp_path / "r" / "update-000002.npz").write_bytes(content)
    second = {"restore": tmp_path / "whole" / "epoch-0002.ckpt", "records_path": tmp_path / "r"}
    refused("update-000002.npz is damaged or not part of a record.* restore an earlier", **second)
    first = {"restore": tmp_path / "whole" / "epoch-0001.ckpt", "records_path": tmp_path / "r"}
    assert tiny(**first)["loss"] == expected["loss"]
    assert [pattern for _, pattern in Records.load(tmp_path / "r").patterns("fc1")] == patterns


def test_log_is_truncated_at_the_checkpoint(tmp_path):
    tiny(log=tmp_path / "log", checkpoint_path=tmp_path / "c")
    expected = (tmp_path / "log").read_text()
    (tmp_path / "log").write_text(expected + "99 0.")
    tiny(log=tmp_path / "log", restore=tmp_path / "c" / "epoch-0001.ckpt")
    assert (tmp_path / "log").read_text() == expected
