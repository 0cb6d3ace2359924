"""The files of a record: names, checked reading, and the recorders that have yet to write.

docs/records.md describes the format.
"""

from __future__ import annotations

import atexit
import json
import operator
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynsparse._core.checks import describe_error, shorten
from dynsparse._core.files.atomic_write import TEMPORARY_SUFFIX
from dynsparse._core.files.folders import LOCK
from dynsparse._core.files.limits import (
    HOW_TO_RAISE,
    LimitError,
    check_regular,
    parse_json,
    read_limit,
)
from dynsparse.pattern.coordinates import block_grid

FORMAT = "dynsparse-record"
VERSION = 1
HEAD = "record.json"
TELEMETRY = "telemetry.jsonl"
LEFT_OVERS = (TEMPORARY_SUFFIX, Path(LOCK).suffix)
"""Suffixes of files that a killed process may leave."""


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


Arrays = Mapping[str, np.ndarray]
"""The arrays of an open npz file, each read when it is asked for."""


@contextmanager
def open_arrays(file: Path) -> Iterator[Arrays]:
    """Open an npz file of a record; damage of any kind is a RecordError."""
    try:
        check_regular(file)
        _check_sizes(file)
        with np.load(file, allow_pickle=False) as arrays:
            yield arrays
    except RecordError:
        raise
    except LimitError as error:
        raise RecordError(f"{file}: {error}") from None
    except Exception as error:  # of any kind: zipfile, zlib and NumPy have many
        reason = describe_error(error)
        raise RecordError(f"{file} is damaged or not part of a record: {reason}") from None


def _check_sizes(file: Path) -> None:
    """Raise LimitError for arrays that would unpack to more than the file's size allows."""
    limit = read_limit(file.stat().st_size)
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.file_size > limit:
                raise LimitError(
                    f"expected at most {limit:,} bytes for an array in a file of this size, got "
                    f"{member.file_size:,}: {HOW_TO_RAISE}"
                )
            if not member.filename.endswith(".npy"):
                raise ValueError(f"expected arrays, got {shorten(member.filename)}")


def read_array(file: Path, archive: Arrays, name: str) -> np.ndarray:
    """An array of an open file; a RecordError if it is missing or not an array."""
    if name not in archive:
        raise RecordError(
            f"{file}: expected the array {shorten(name)}, got {shorten(list(archive))}"
        )
    array = archive[name]
    if not isinstance(array, np.ndarray):  # NumPy returns the bytes of what is no array
        raise RecordError(f"{file} is damaged: {shorten(name)} is not an array")
    return array


def update_file_name(index: int) -> str:
    return f"update-{index:06d}.npz"


def list_update_files(path: Path) -> list[Path]:
    files = sorted(path.glob("update-*.npz"))
    for index, file in enumerate(files):
        if file.name != update_file_name(index):
            raise RecordError(
                f"the record {path} is incomplete: {update_file_name(index)} is missing"
            )
    return files


def read_head(path: Path) -> tuple[dict[str, RecordedLayer], dict[str, Any]]:
    file = path / HEAD
    if not file.is_file():
        raise RecordError(f"expected a folder with a record, found no {HEAD} in {path}")
    try:
        head = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise RecordError(f"{file} is damaged: {error}") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise RecordError(f'{file} is not a record: expected "format": "{FORMAT}"')
    if head.get("version") != VERSION:
        raise RecordError(
            f"{file} has the format version {shorten(head.get('version'))}, this dynsparse reads "
            f"{VERSION}: use the version of dynsparse that wrote it"
        )
    try:
        layers = {name: _read_layer(layer) for name, layer in head["layers"].items()}
        metadata = head["metadata"]
        if not layers or not isinstance(metadata, dict):
            raise ValueError("expected layers, and an object of metadata")
    except LimitError as error:
        raise RecordError(f"{file}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{file} is damaged: {describe_error(error)}") from None
    return layers, metadata


def _read_layer(layer: Any) -> RecordedLayer:
    shape, block_size = layer["shape"], layer["block_size"]
    shape, block_size, _ = block_grid(shape, block_size)
    recorded = RecordedLayer(shape, block_size)
    # Readers hold eight bytes for each input and output.
    if (most := read_limit() // 8) < sum(recorded.shape):
        raise LimitError(
            f"expected layers of at most {most:,} inputs and outputs, got {sum(recorded.shape):,}: "
            f"{HOW_TO_RAISE}"
        )
    return recorded


def read_step(file: Path) -> int:
    with open_arrays(file) as archive:
        step = read_array(file, archive, "step")
        if step.shape != () or not np.issubdtype(step.dtype, np.integer):
            actual = f"{step.dtype} {list(step.shape)}"
        elif step < 0:
            actual = str(step)
        else:
            return int(step)
    raise RecordError(f"{file}: 'step' must be one integer of at least 0, got {actual}")


def read_telemetry(path: Path) -> list[dict[str, Any]]:
    file = path / TELEMETRY
    if not file.exists():
        return []
    try:
        check_regular(file)
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{file} is damaged: {error}") from None
    # The last piece has no line end: it is empty, or a line whose writing was interrupted.
    entries = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            entry = parse_json(line)
            entry["step"] = operator.index(entry["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{file}, line {number} is damaged: {error}") from None
        entries.append(entry)
    return entries


def _to_plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def to_json(value: Any, what: str) -> str:
    try:
        return json.dumps(value, default=_to_plain)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} must hold what JSON can: {error}") from None


pending_recorders: set[Any] = set()
"""Recorders that wait for updates from devices, held until they have written these."""


def write_pending_updates() -> None:
    """Wait for updates from devices and write them: before a state is saved, which the record must
    lead to, and before a record is read."""
    for recorder in list(pending_recorders):
        recorder.flush()


atexit.register(write_pending_updates)
