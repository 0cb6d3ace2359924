"""The log of the original program."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dynsparse.files.whole import write_text_whole


class TextLog:
    """A heading, then "<steps> <training accuracy>" per report.

    Args:
        step: of the training that goes on; lines of later steps, which a kill has left, are
            forgotten, and at 0 all are.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, label: str, step: int) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"Iteration {label}"]
        if step and path.exists():
            # The last piece has no line end: nothing, or a line whose writing was cut short.
            lines = [line for line in path.read_text().split("\n")[:-1] if _step(line) <= step]
        write_text_whole(path, "".join(f"{line}\n" for line in lines))

    def log(self, step: int, figures: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(f"{step} {figures['accuracy']:.8f}\n")
            file.flush()
            os.fsync(file.fileno())

    def close(self, figures: dict[str, Any]) -> None:
        """Every line was written when it was logged."""


def _step(line: str) -> int:
    number = line.partition(" ")[0]
    return int(number) if number.isdecimal() else 0
