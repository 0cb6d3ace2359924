"""Read, change and rewrite checkpoint files with valid digests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynsparse.ranks import Ranks
from dynsparse.training.checkpoint.format import (
    CheckpointReader,
    Layout,
    _full_tensors,
    header_of,
    to_bytes,
)

OWN = ("random", "generators", "history")


def read_parts(path: Path) -> dict[str, Any]:
    """Read all parts of a checkpoint of one process: shared by ranks, and per rank."""
    reader = CheckpointReader(path)
    reader.verify()
    return _full_tensors({**reader.parts(), **reader.rank_parts({0})[0]})


def write_parts(path: Path, parts: Any) -> None:
    """Write any parts, with a valid digest."""
    own = {key: parts[key] for key in OWN if key in parts} if isinstance(parts, dict) else {}
    if isinstance(parts, dict):
        parts = {key: value for key, value in parts.items() if key not in OWN}
    ranks = Ranks()
    layout = Layout(ranks)
    header = header_of(layout, parts, own, "0" * 8, ranks)
    path.write_bytes(to_bytes(header, layout.tensors))


def edit_header(path: Path, change: Any) -> None:
    """Change the JSON of a checkpoint's file, and update its digest."""
    file = CheckpointReader(path)._files[0]
    tensors = {name: file.read(name) for name in file._file.keys()}  # noqa: SIM118  no dictionary
    header = file.header
    header.pop("sha256")
    change(header)
    path.write_bytes(to_bytes(header, tensors))
