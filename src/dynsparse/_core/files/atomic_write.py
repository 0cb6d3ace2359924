"""Atomic writes: after an error, a kill or a power cut there is the old file or the new one."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

TEMPORARY_SUFFIX = ".tmp"
"""The suffix of temporary files, which a kill may leave behind; their names begin with a dot."""


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Replace the file `path` atomically: write the new one to the yielded temporary path.

    A context manager. At its end it flushes the file to the disk, renames it to `path`, and flushes
    the folder. After an error it removes the temporary file, and `path` stays as it was.

    Raises:
        OSError: `path` is a folder, the folder around it is missing or cannot be written, or the
            disk is full.
    """
    path = Path(os.path.realpath(path))  # a link stays one, to the new file
    if not path.parent.is_dir():
        error = NotADirectoryError if path.parent.exists() else FileNotFoundError
        raise error(f"there is no folder {path.parent}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: expected the path of a file")
    # A random name: two writers never write into one file.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # the error that led here says more
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def atomic_write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file atomically; `write` gets the open stream.

    A device or a pipe, as /dev/stdout, is written to directly.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with open(path, "wb") as file:
            write(file)
        return
    with replace_file(path) as temporary, open(temporary, "xb") as file:
        write(file)


def atomic_write_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8; see `atomic_write`."""
    atomic_write(path, lambda file: file.write(text.encode()))


def remove_temporary_files(folder: Path) -> None:
    """Remove the temporary files of killed processes from `folder`.

    Call it only while no other process writes to the folder.
    """
    for file in folder.iterdir():
        if re.fullmatch(rf"\..+\.[0-9a-f]{{8}}{re.escape(TEMPORARY_SUFFIX)}", file.name):
            file.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Flush a folder to the disk, so that new names in it survive a power cut."""
    if os.name != "posix":
        return  # other systems cannot open a folder
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
