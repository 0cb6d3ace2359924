"""Folders: one writer at a time, and where downloads are cached."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dynsparse._core import logs

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".training.lock"
"""The name of the lock file in its folder. One that a kill has left does no harm."""

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def cache_folder() -> Path:
    """Return the folder for downloads and measurements: DYNSPARSE_CACHE_DIR or the user cache."""
    import platformdirs

    path = os.environ.get("DYNSPARSE_CACHE_DIR")
    return Path(path or platformdirs.user_cache_dir("dynsparse"))


class BusyError(ValueError):
    """Another process writes to the folder; the message is one line."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder, which the system releases if the process is killed.

    A context manager. It yields True, or on a file system without locks False, with a
    RuntimeWarning.

    Raises:
        BusyError: another process holds it.
        OSError: the folder is missing or cannot be written.
    """
    path = folder / LOCK
    handle = _open_locked(path)
    try:
        if handle is not None:
            _write_holder(handle)
        yield handle is not None
    finally:
        if handle is not None:
            # Before the lock is released: a process that has opened the file sees that it is gone
            # and tries again.
            with suppress(OSError):
                path.unlink()
            os.close(handle)


def _open_locked(path: Path) -> int | None:
    """Open and lock the file `path`; return its descriptor, or None if there are no locks."""
    while True:
        # Not through a symbolic link, which an untrusted folder may hold.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            if not _lock(handle, path):
                os.close(handle)
                return None
            if _is_current(handle, path):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, path: Path) -> bool:
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 200).decode(errors="replace").strip()
        raise BusyError(
            f"another training writes into {path.parent} ({holder or 'an unknown process'}): "
            "wait until it ends, or choose another folder"
        ) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        logs.warn(
            f"{path.parent} is on a file system without locks ({error.strerror}): make sure that "
            "no other training writes there",
            RuntimeWarning,
        )
        return False
    return True


def _is_current(handle: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`: its last holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _write_holder(handle: int) -> None:
    """Write the id of this process into the lock file; ignore a full disk."""
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
