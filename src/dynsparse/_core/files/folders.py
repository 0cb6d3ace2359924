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
    """DYNSPARSE_CACHE_DIR, or the user's cache folder: for downloads and measured figures."""
    import platformdirs

    path = os.environ.get("DYNSPARSE_CACHE_DIR")
    return Path(path or platformdirs.user_cache_dir("dynsparse"))


class BusyError(ValueError):
    """Another process writes to the folder; the message is one line."""


@contextmanager
def only_writer(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder, which the system releases after a kill.

    Yields whether it is held: where the file system has no locks there is a RuntimeWarning instead.

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
            # While it is held: whoever has opened the file by now finds it gone, and tries again.
            with suppress(OSError):
                path.unlink()
            os.close(handle)


def _open_locked(path: Path) -> int | None:
    """The open and locked file `path`; None where there are no locks."""
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
    """Whether the open file still has the name; its last holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _write_holder(handle: int) -> None:
    """Write down who holds the lock; on a full disk it is held all the same."""
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
