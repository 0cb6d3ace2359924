"""The log of the original program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["TextLog"]


class TextLog:
    """A heading, then "<steps> <training accuracy>" per report.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, label: str, *, resumes: bool) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (resumes and path.exists()):
            path.write_text(f"Iteration {label}\n")

    def log(self, step: int, figures: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(f"{step} {figures['accuracy']:.8f}\n")

    def close(self, figures: dict[str, Any]) -> None:
        """Every line was written when it was logged."""
