"""The files of a record: their names, how they are written whole, how damage is told apart.

docs/records.md describes the format; `recorder.py` gives it a meaning.
"""

from __future__ import annotations

import json
import operator
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynsparse.pattern import SparsePattern

FORMAT = "dynsparse-record"
VERSION = 1
HEAD = "record.json"
TELEMETRY = "telemetry.jsonl"
PART = ".part"


class RecordError(ValueError):
    """A record that cannot be read, continued or written; the message is one line."""


@dataclass(frozen=True)
class RecordedLayer:
    """A layer of a record: `shape` is (out_features, in_features) in elements."""

    shape: tuple[int, int]
    block_size: int

    @property
    def grid(self) -> tuple[int, int]:
        """The shape in blocks."""
        return self.shape[0] // self.block_size, self.shape[1] // self.block_size

    @property
    def total(self) -> int:
        """How many blocks the matrix has, present or not."""
        return self.grid[0] * self.grid[1]

    @classmethod
    def of(cls, pattern: SparsePattern) -> RecordedLayer:
        return cls(pattern.shape, pattern.block_size)


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """An npz file of a record, with every way of being damaged turned into a RecordError."""
    try:
        # np.load leaves a file open that it cannot read when it opened it itself.
        with file.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("not an npz archive")
            with archive:
                yield archive
    except RecordError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise RecordError(f"{file} is damaged or not part of a record: {error}") from None


def update_name(index: int) -> str:
    return f"update-{index:06d}.npz"


def update_files(path: Path) -> list[Path]:
    files = sorted(path.glob("update-*.npz"))
    for index, file in enumerate(files):
        if file.name != update_name(index):
            raise RecordError(f"the record {path} is incomplete: {update_name(index)} is missing")
    return files


def read_head(path: Path) -> tuple[dict[str, RecordedLayer], dict[str, Any]]:
    file = path / HEAD
    if not file.is_file():
        raise RecordError(f"expected a folder with a record, found no {HEAD} in {path}")
    try:
        head = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RecordError(f"{file} is damaged: {error}") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise RecordError(f'{file} is not a record: expected "format": "{FORMAT}"')
    if head.get("version") != VERSION:
        raise RecordError(
            f"{file} has the format version {head.get('version')!r}, this dynsparse reads "
            f"{VERSION}: use the version of dynsparse that wrote it"
        )
    try:
        layers = {}
        for name, layer in head["layers"].items():
            empty = SparsePattern([], [], shape=layer["shape"], block_size=layer["block_size"])
            layers[name] = RecordedLayer.of(empty)
        metadata = dict(head["metadata"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{file} is damaged: {error}") from None
    return layers, metadata


def read_step(file: Path) -> int:
    with opened(file) as archive:
        if "step" not in archive:
            raise RecordError(f"{file}: expected the array 'step', got {archive.files}")
        step = archive["step"]
        if step.shape != () or not np.issubdtype(step.dtype, np.integer) or step < 0:
            raise RecordError(f"{file}: 'step' must be one integer of at least 0, got {step}")
        return int(step)


def read_telemetry(path: Path) -> list[dict[str, Any]]:
    file = path / TELEMETRY
    if not file.exists():
        return []
    lines = file.read_text().split("\n")
    # The last piece has no line end: nothing, or a line whose writing was cut short.
    entries = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            entry = json.loads(line)
            entry["step"] = operator.index(entry["step"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise RecordError(f"{file}, line {number} is damaged: {error}") from None
        entries.append(entry)
    return entries


def write_whole(file: Path, write: Callable[[Any], Any]) -> None:
    part = file.with_name(f".{file.name}{PART}")
    with part.open("wb") as stream:
        write(stream)
    os.replace(part, file)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def to_json(value: Any, what: str) -> str:
    try:
        return json.dumps(value, default=_plain)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} must hold what JSON can: {error}") from None
