"""Kill or fail this process at a chosen file operation.

`arm` counts the operations on files below a folder: opening for writing, each write, each fsync,
renaming, removing, creating a folder, locking. At the chosen one it injects a fault. The package
has no code for this: audit hooks observe the standard library; `open` and `os.fsync` are wrapped.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

KINDS = ("before", "torn", "power", "full", "readonly", "lockless")
"""What happens at the operation:

- before: SIGKILL before it; after the n-th is before the next.
- torn: SIGKILL after half of a write has reached the file; before any other operation.
- power: as torn, and whatever was written without an fsync since is cut off, as a power cut does.
- full: the disk is full from then on: ENOSPC for all that needs room.
- readonly: the file system is read-only from then on: EROFS.
- lockless: it has no locks: ENOLCK, from the beginning.
"""
_ERRORS = {"full": errno.ENOSPC, "readonly": errno.EROFS, "lockless": errno.ENOLCK}


class Crash:
    """Counts file operations below `folder` and injects a fault at number `at`.

    If `at` is None, it only counts.
    """

    def __init__(self, folder: Path, kind: str, at: int | None) -> None:
        self.folder = f"{folder.resolve()}{os.sep}"
        self.kind = kind
        self.at = at
        self.count = 0
        self.unsynced: dict[int, tuple[str, int]] = {}
        self.over = False

    def concerns(self, path: Any) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False
        return os.path.abspath(os.fsdecode(path)).startswith(self.folder)

    def operation(self, name: str, write: _Watched | None = None, content: Any = b"") -> None:
        """Count an operation, before it happens; a kill does not return."""
        if self.over:
            return
        self.count += 1
        if self.kind == "lockless":
            if name == "lock":
                self._fail()
            return
        if self.at is None or self.count < self.at:
            return
        if self.kind == "full":
            if name in ("open", "write", "mkdir"):
                if write is not None:
                    write.half(content)
                self._fail()
            return
        if self.kind == "readonly":
            self._fail()
        self.over = True
        if self.kind in ("torn", "power") and write is not None:
            write.half(content)
        if self.kind == "power":
            for path, size in self.unsynced.values():
                if os.path.exists(path):
                    os.truncate(path, size)
        os.kill(os.getpid(), signal.SIGKILL)

    def _fail(self) -> None:
        number = _ERRORS[self.kind]
        raise OSError(number, os.strerror(number))

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if mode is None else False
            # Python's own open comes with a mode, and is seen by `_open`.
            if writes and self.concerns(path):
                self.operation("open")
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            if self.concerns(arguments[0]):
                self.operation(event[3:])
        elif event == "fcntl.flock":
            self.operation("lock")


class _Watched:
    """A file open for writing, whose writes are counted."""

    def __init__(self, file: Any, path: str, crash: Crash) -> None:
        self._file, self._path, self._crash = file, path, crash
        self._size = os.fstat(file.fileno()).st_size

    def write(self, content: Any) -> int:
        self._crash.operation("write", self, content)
        self._crash.unsynced[self._file.fileno()] = self._path, self._size
        return self._file.write(content)

    def half(self, content: Any) -> None:
        self._file.write(content[: len(content) // 2])
        self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def arm(folder: Path, kind: str, at: int | None) -> Crash:
    """Start counting, for the rest of this process, which must have a single thread."""
    crash = Crash(folder, kind, at)
    opened, synced = builtins.open, os.fsync

    def watched_open(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if not set(mode) & set("wax+") or not crash.concerns(file):
            return opened(file, mode, *rest, **more)
        crash.operation("open")
        return _Watched(opened(file, mode, *rest, **more), os.fsdecode(file), crash)

    def watched_fsync(handle: int) -> None:
        crash.operation("fsync")
        synced(handle)
        # What another descriptor of the same file wrote is on the disk, too.
        path = os.readlink(f"/proc/self/fd/{handle}")
        for other, (written, _) in list(crash.unsynced.items()):
            if os.path.abspath(written) == path:
                del crash.unsynced[other]

    builtins.open = io.open = watched_open
    os.fsync = watched_fsync
    sys.addaudithook(crash.audit)
    return crash
