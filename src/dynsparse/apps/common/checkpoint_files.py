"""The checkpoints that a training leaves in a folder, named by how far it was."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["latest_checkpoint"]


def latest_checkpoint(path: Path, unit: str, digits: int) -> Path:
    """`path` itself, or the newest of its files `unit`-NNN.ckpt (at least `digits` of N) if it is a
    folder.

    Raises:
        FileNotFoundError: nothing there.
    """
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(
                f"--restore: expected a checkpoint or a folder of them, got {path}, which does not "
                "exist"
            )
        return path
    found = {
        int(match[1]): file
        for file in path.iterdir()
        if (match := re.fullmatch(rf"{unit}-(\d{{{digits},}})\.ckpt", file.name))
    }
    if not found:
        raise FileNotFoundError(
            f"--restore: expected a folder with checkpoints named {unit}-{'N' * digits}.ckpt, got "
            f"{path} without any"
        )
    return found[max(found)]
