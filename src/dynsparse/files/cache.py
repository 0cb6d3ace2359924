"""Results that took time to make, kept on the disk for other processes.

An entry lies under everything its result depends on, so none is ever out of date. It is written
whole and carries a checksum; whatever is wrong with one costs what it takes to make it again. Of
more than the limit, those that were not used for the longest time go.

`DYNSPARSE_CACHE_DIR` names the folder, in place of the user's cache folder; `DYNSPARSE_CACHE_SIZE`
the limit in bytes, 0 for no cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynsparse.files.json_text import parse_json
from dynsparse.files.whole import LEFT_OVER, write_whole

__all__ = ["Cache", "Kept", "cache_folder", "open_cache"]

_log = logging.getLogger(__name__)

_SIZE = "DYNSPARSE_CACHE_SIZE"
_DEFAULT_SIZE = 256 << 20
_FOLDER = "results"  # beside the folders of downloaded data
_HEAD = b"dynsparse result 1\n"
_ENTRY = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = re.compile(rf"\.[0-9a-f]{{64}}\.[0-9a-f]{{8}}{re.escape(LEFT_OVER)}")
_LONGEST_WRITE = 3600  # seconds; whoever has written for longer was killed


def cache_folder() -> Path:
    """Where downloads and results are kept: DYNSPARSE_CACHE_DIR, or the user's cache folder."""
    import platformdirs

    given = os.environ.get("DYNSPARSE_CACHE_DIR")
    return Path(given or platformdirs.user_cache_dir("dynsparse"))


def open_cache() -> Cache:
    """The cache that the environment asks for.

    Raises:
        ValueError: DYNSPARSE_CACHE_SIZE is no number of bytes.
    """
    given = os.environ.get(_SIZE)
    if given and not (given.isascii() and given.isdigit() and len(given) < 20):
        raise ValueError(
            f"{_SIZE}: expected a number of bytes, or 0 for no cache, got {given[:40]!r}"
        )
    return Cache(cache_folder() / _FOLDER, int(given) if given else _DEFAULT_SIZE)


@dataclass(frozen=True)
class Kept:
    """How many entries, and the bytes of their files."""

    entries: int
    bytes: int


class Cache:
    """Bytes by kind and key under a folder, which is made when something is put there.

    Any number of processes and threads may use one folder. A folder that cannot be written is an
    empty cache; the log says so.

    Args:
        folder: where the entries are, a folder for each kind.
        limit: bytes that they may take together; 0: nothing is kept and nothing found.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit

    def get(self, kind: str, key: str) -> bytes | None:
        """What was put there under the kind and the key; None if there is nothing, or damage."""
        if not self.limit:
            return None
        path = self._path(kind, key)
        try:
            with open(path, "rb") as file:
                sealed = file.read(self.limit + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.info("an entry of the cache cannot be read: %s", error)
            return None
        head = _head(kind, key, sealed[len(_HEAD) + 65 :])
        if not sealed.startswith(head):
            _log.info("an entry of the cache is damaged, and made again: %s", path)
            return None
        with suppress(OSError):
            os.utime(path)  # used now
        return sealed[len(head) :]

    def put(self, kind: str, key: str, content: bytes) -> bool:
        """Keep `content` for who asks for the kind and the key; whether it is kept.

        Args:
            kind: the name of a folder: letters, digits and dashes.
            key: everything that the content depends on, as a text of any length.
        """
        sealed = _head(kind, key, content) + content
        if len(sealed) > self.limit:
            return False
        path = self._path(kind, key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, lambda file: file.write(sealed))
            self._make_room()
        except OSError as error:
            _log.info("the cache keeps nothing: %s", error)
            return False
        return True

    def remove(self, kind: str, key: str) -> bool:
        """Remove what is kept under the kind and the key; whether there was anything.

        Raises:
            OSError: it cannot be removed.
        """
        try:
            self._path(kind, key).unlink()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def get_json(self, kind: str, key: str) -> Any:
        """`get`, of what `put_json` has kept; None where there is nothing."""
        content = self.get(kind, key)
        if content is None:
            return None
        try:
            return parse_json(content)
        except ValueError as error:  # larger than JSON may be here
            _log.info("an entry of the cache cannot be read: %s", error)
            return None

    def put_json(self, kind: str, key: str, value: Any) -> bool:
        """`put`, of what JSON can say."""
        return self.put(kind, key, json.dumps(value, allow_nan=False).encode())

    def kinds(self) -> dict[str, Kept]:
        """What there is of each kind."""
        found: dict[str, list[int]] = {}
        for path, status in self._files():
            if _ENTRY.fullmatch(path.name):
                found.setdefault(path.parent.name, []).append(status.st_size)
        return {kind: Kept(len(found[kind]), sum(found[kind])) for kind in sorted(found)}

    def clear(self) -> Kept:
        """Remove all entries, and what kills have left; what went.

        Raises:
            OSError: a file cannot be removed.
        """
        entries = size = 0
        for path, status in self._files():
            path.unlink(missing_ok=True)
            entries += bool(_ENTRY.fullmatch(path.name))
            size += status.st_size
        return Kept(entries, size)

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / kind / hashlib.sha256(key.encode()).hexdigest()

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Entries, and files that are being written or that a kill has left; nothing else."""
        with suppress(FileNotFoundError, NotADirectoryError):
            for folder in [one for one in self.folder.iterdir() if one.is_dir()]:
                for path in folder.iterdir():
                    if _ENTRY.fullmatch(path.name) or _UNFINISHED.fullmatch(path.name):
                        with suppress(FileNotFoundError):  # another process has removed it
                            yield path, path.stat()

    def _make_room(self) -> None:
        """Remove what was not used for the longest time, down to the limit."""
        begin = time.time()
        entries = []
        for path, status in self._files():
            if _ENTRY.fullmatch(path.name):
                entries.append((status.st_mtime_ns, status.st_size, path))
            elif status.st_mtime < begin - _LONGEST_WRITE:
                path.unlink(missing_ok=True)
        over = sum(size for _, size, _ in entries) - self.limit
        for _, size, path in sorted(entries):
            if over <= 0:
                return
            path.unlink(missing_ok=True)
            over -= size


def _head(kind: str, key: str, content: bytes) -> bytes:
    """What stands before the content: a checksum, of what it belongs to as well."""
    digest = hashlib.sha256(json.dumps([kind, key]).encode())
    digest.update(content)
    return _HEAD + digest.hexdigest().encode() + b"\n"
