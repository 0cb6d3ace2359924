"""Helpers of the targets: a folder in memory, and the check of expected errors."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_MEMORY = Path("/dev/shm")
_LONGEST = 2000
_folders: dict[int, Path] = {}


def folder() -> Path:
    """Return a temporary folder of this process, in memory if the system supports that."""
    found = _folders.get(os.getpid())
    if found is None:
        parent = _MEMORY if os.access(_MEMORY, os.W_OK) else None
        found = Path(tempfile.mkdtemp(prefix="dynsparse-fuzz-", dir=parent))
        _folders[os.getpid()] = found
        atexit.register(shutil.rmtree, found, ignore_errors=True)
    return found


@contextlib.contextmanager
def refused_as(*kinds: type[Exception]) -> Iterator[None]:
    """Accept errors of `kinds` with a printable message; all others are findings."""
    try:
        yield
    except kinds as error:
        message = str(error)
    else:
        return
    assert message, "a refusal that says nothing"
    assert len(message) <= _LONGEST, f"a message of {len(message)} characters"
    message.encode()  # a command prints it: lone surrogates would end in an error of their own
