"""Folder locks: one writer at a time, over processes, after kills, without file locks."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from dynsparse._core.files.folders import LOCK, BusyError, lock_folder

HOLD = """
import sys, time
from pathlib import Path
from dynsparse._core.files.folders import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("in", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"in\n"
        yield process
        process.kill()


def test_second_writer_raises_with_the_first_writers_process(tmp_path, holder):
    with pytest.raises(BusyError, match=rf"process {holder.pid} on .*choose another") as error:
        lock_folder(tmp_path).__enter__()
    assert "\n" not in str(error.value)
    assert (tmp_path / LOCK).exists()


@pytest.mark.slow
def test_killed_writer_leaves_no_lock(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert (tmp_path / LOCK).exists()
    with lock_folder(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / LOCK).read_text()
    assert not (tmp_path / LOCK).exists()


def test_within_one_process(tmp_path):
    with lock_folder(tmp_path):
        with pytest.raises(BusyError):
            lock_folder(tmp_path).__enter__()
        assert (tmp_path / LOCK).exists()
    with lock_folder(tmp_path):
        pass


def test_lock_file_removed_by_its_holder_is_recreated(tmp_path, monkeypatch):
    """The file is opened before the holder removes it, and locked afterwards."""
    lock, calls = fcntl.flock, []

    def late(handle: int, kind: int) -> None:
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(handle)
        lock(handle, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with lock_folder(tmp_path):
        assert len(calls) == 2
        monkeypatch.undo()
        with pytest.raises(BusyError):
            lock_folder(tmp_path).__enter__()


def test_file_system_without_locks(tmp_path, monkeypatch):
    def none(handle: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    expected = pytest.warns(RuntimeWarning, match="without locks .*no other training writes there")
    with expected, lock_folder(tmp_path):
        pass


def test_symbolic_link_as_lock_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("text")
    (tmp_path / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=LOCK):
        lock_folder(tmp_path).__enter__()
    assert (tmp_path / "precious").read_text() == "text"


def test_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        lock_folder(tmp_path / "none").__enter__()
