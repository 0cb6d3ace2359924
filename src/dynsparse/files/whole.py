"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

LEFT_OVER = ".tmp"
"""How the names of files end that a kill has left unfinished; they begin with a dot."""


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A name beside `path` to write a file to; without an error it then takes the place of `path`.

    The file is brought to the disk before, and its name after: after an error, a kill or a power
    cut there is the old file or the new.

    Raises:
        OSError: the folder is missing or cannot be written, or the disk is full.
    """
    path = Path(os.path.realpath(path))  # a link stays one, to the new file
    # A name of its own for each writer: two of them never write into one file.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{LEFT_OVER}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Make the file `path` of what `write` writes into the stream it gets; see `replaced`.

    A device or a pipe, as /dev/stdout, is written to as it is.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with open(path, "wb") as file:
            write(file)
        return
    with replaced(path) as temporary, open(temporary, "xb") as file:
        write(file)


def write_text_whole(path: Path, text: str) -> None:
    """Make the file `path` of `text` in UTF-8; see `write_whole`."""
    write_whole(path, lambda file: file.write(text.encode()))


def remove_left_overs(folder: Path) -> None:
    """Remove what kills have left of files that `replaced` was to put into `folder`.

    For who knows that nobody writes there now.
    """
    for file in folder.iterdir():
        if re.fullmatch(rf"\..+\.[0-9a-f]{{8}}{re.escape(LEFT_OVER)}", file.name):
            file.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """The new name, too, must survive a power cut."""
    if os.name != "posix":
        return  # there a folder cannot be opened
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
