"""Atomic writes: a file appears completely or not at all."""

import os
import threading

import pytest

from dynsparse._core.files.atomic_write import atomic_write, atomic_write_text


def test_new_and_replaced_files(tmp_path):
    file = tmp_path / "a"
    atomic_write_text(file, "ä")
    assert file.read_bytes() == "ä".encode()
    atomic_write(file, lambda stream: stream.write(b"other"))
    assert file.read_bytes() == b"other"
    assert list(tmp_path.iterdir()) == [file]


def test_error_keeps_the_existing_file(tmp_path):
    file = tmp_path / "a"
    atomic_write_text(file, "before")

    def write(stream):
        stream.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atomic_write(file, write)
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


def test_missing_folder_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*/b$"):
        atomic_write_text(tmp_path / "b" / "a", "x")
    with pytest.raises(IsADirectoryError, match="is a folder: expected the path of a file"):
        atomic_write_text(tmp_path, "x")


def test_order_of_fsync_and_rename(tmp_path, monkeypatch):
    told = []
    fsync, replace = os.fsync, os.replace

    def synced(handle):
        told.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    def replaced(*names):
        told.append("name")
        replace(*names)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    atomic_write_text(tmp_path / "a", "x")
    assert told == ["file", "name", "folder"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_pipes_are_written_and_links_are_kept(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    atomic_write_text(pipe, "through")
    reader.join()
    assert got == ["through"]
    assert pipe.is_fifo()
    link, file = tmp_path / "link", tmp_path / "file"
    file.write_text("old")
    link.symlink_to(file)
    atomic_write_text(link, "new")
    assert link.is_symlink()
    assert file.read_text() == "new"
