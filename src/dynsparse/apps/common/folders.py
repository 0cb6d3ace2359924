"""What a folder holds already, and whether a training may write there."""

from __future__ import annotations

from pathlib import Path

from dynsparse.apps.common.identity import KEY, identities
from dynsparse.apps.common.resume import checkpoints_in
from dynsparse.apps.common.training import Training
from dynsparse.training.records import Recorder


def check_own(training: Training, folder: Path, *, overwrite: bool) -> list[Path]:
    """The checkpoints in `folder` that are not of `training`, the newest last.

    Raises:
        ValueError: there are some, and `overwrite` is not set.
    """
    found = identities(checkpoints_in(type(training), folder))
    others = [file for file, identity in found.items() if identity != training.identity]
    if others and not overwrite:
        newest = others[-1]
        if found[newest] is None:
            raise ValueError(
                f"--checkpoint-path: expected checkpoints of this training, got {newest}, which "
                "cannot be read: move it away, or let it be deleted with --overwrite"
            )
        raise ValueError(
            f"--checkpoint-path: expected a folder without checkpoints of another training, got "
            f"{newest}: go on with that one by --restore {folder}, choose another folder, or let "
            "them be deleted with --overwrite"
        )
    return others


def check_new(recorder: Recorder, *, overwrite: bool) -> None:
    """Raise ValueError if a training that begins would delete what another has recorded.

    A record of nothing but the first patterns, as of a training that was killed at once, is no
    loss.
    """
    if recorder.holds_updates and not overwrite:
        raise ValueError(
            f"--records-path: expected a folder without the record of another training, got "
            f"{recorder.path} with one: go on with that training by --restore, choose another "
            "folder, or let the record be deleted with --overwrite"
        )


def check_continued(recorder: Recorder, training: Training) -> None:
    """Raise ValueError unless the record is of `training`, which was restored."""
    path = recorder.path
    if not recorder.has_record:
        raise ValueError(
            f"--records-path: expected the record of the restored training, got {path} without "
            "one: name its folder, or leave --records-path out"
        )
    if recorder.earlier.get(KEY) != training.identity:
        raise ValueError(
            f"--records-path: expected the record of the restored training, got {path} with that "
            "of another: name its folder, or leave --records-path out"
        )
