"""Which training a checkpoint or a record is of."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dynsparse.training.checkpoint.format import CheckpointReader

KEY = "training_id"
"""Under this name checkpoints keep it in `extra`, and records in their metadata."""


def new_identity() -> str:
    """Of a training that begins; the same for nobody else."""
    return secrets.token_hex(16)


def identity_of(extra: Any) -> str:
    """What a checkpoint's `extra` says.

    Raises:
        ValueError: none, or something that is no identity.
    """
    found = extra.get(KEY) if isinstance(extra, Mapping) else None
    if not isinstance(found, str) or not re.fullmatch(r"[0-9a-f]{32}", found):
        raise ValueError("expected the identity of a training, 32 hexadecimal digits")
    return found


def identities(files: Iterable[Path]) -> dict[Path, str | None]:
    """The training of each checkpoint; None for a file that cannot be read as one.

    Raises:
        OSError: a file that may not be read.
    """
    return {file: _identity(file) for file in files}


def _identity(file: Path) -> str | None:
    try:
        return identity_of(CheckpointReader(file).peek_extra())
    except (TypeError, ValueError):
        return None
