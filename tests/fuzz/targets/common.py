"""What the targets share: a folder in memory, and what a refusal must look like."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["folder", "refused_as"]

_MEMORY = Path("/dev/shm")
_LONGEST = 2000
_folders: dict[int, Path] = {}


def folder() -> Path:
    """A folder of this process, in memory where the system offers that, to write files into."""
    found = _folders.get(os.getpid())
    if found is None:
        parent = _MEMORY if os.access(_MEMORY, os.W_OK) else None
        found = Path(tempfile.mkdtemp(prefix="dynsparse-fuzz-", dir=parent))
        _folders[os.getpid()] = found
        atexit.register(shutil.rmtree, found, ignore_errors=True)
    return found


@contextlib.contextmanager
def refused_as(*kinds: type[Exception]) -> Iterator[None]:
    """Errors of `kinds` are refusals, if their message can be shown; all others are findings."""
    try:
        yield
    except kinds as error:
        message = str(error)
    else:
        return
    assert message, "a refusal that says nothing"
    assert len(message) <= _LONGEST, f"a message of {len(message)} characters"
    message.encode()  # a command prints it: lone surrogates would end in an error of their own
