"""Full and read-only disks, file size limits, missing locks, wrong clocks, two writers."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
from sizes import TEXT
from trainings import Server, begin, checkpoints, difference, outcome, with_last_epoch, written

from dynsparse.training.checkpoint import read_extra

APPS = ("mnist", "lm")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainings")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def references(server, root):
    folder = root
    found = {}
    for app in APPS:
        (folder / app).mkdir()
        answer = server.run(app, folder / app, **begin(app, folder / app))
        assert answer["error"] is None
        found[app] = answer["count"], outcome(app, folder / app)
    return found


@pytest.fixture
def folder(root):
    place = root / "place"
    place.mkdir()
    yield place
    shutil.rmtree(place)


def clear(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def check_resumes(server: Server, app: str, folder, expected) -> None:
    """Check that the checkpoints are complete and that a resume ends in the expected state."""
    for file in checkpoints(app, folder):
        read_extra(file)
    answer = server.resume(app, folder)
    assert (answer["status"], answer["error"]) == (0, None)
    assert difference(expected, with_last_epoch(outcome(app, folder), expected)) is None


@pytest.mark.parametrize("app", APPS)
def test_full_disk(server, app, folder, references):
    count, expected = references[app]
    for at in range(2, count, count // 12):
        clear(folder)
        answer = server.run(app, folder, kind="full", at=at, **begin(app, folder))
        assert answer["status"] == 0
        # Once the files are complete nothing needs room any more.
        assert "No space left on device" in (answer["error"] or "No space left on device")
        if at < count - 12:
            assert answer["error"].startswith("OSError: [Errno 28]")
        # Nothing half-written takes room on the full disk.
        assert not list(folder.glob("*/.*"))
        check_resumes(server, app, folder, expected)


@pytest.mark.parametrize("app", APPS)
def test_file_size_limit(server, app, folder, references):
    """RLIMIT_FSIZE acts like a quota: the write itself is short."""
    _, expected = references[app]
    size = max(f.stat().st_size for f in _reference_files(server, app, folder))
    for limit in (0, 100, 1000, size // 2):
        clear(folder)
        answer = server.run(app, folder, limit=limit, **begin(app, folder))
        assert "File too large" in answer["error"]
        assert "\n" not in answer["error"]
        assert not list(folder.glob("*/.*.tmp"))
        check_resumes(server, app, folder, expected)


def _reference_files(server, app, folder):
    server.run(app, folder, **begin(app, folder))
    return checkpoints(app, folder)


@pytest.mark.parametrize("app", APPS)
def test_file_system_becomes_read_only(server, app, folder, references):
    count, expected = references[app]
    for at in range(1, count, count // 8):
        clear(folder)
        answer = server.run(app, folder, kind="readonly", at=at, **begin(app, folder))
        assert answer["status"] == 0
        assert "[Errno 30] Read-only file system" in answer["error"]
        check_resumes(server, app, folder, expected)


@pytest.mark.parametrize("app", APPS)
def test_file_system_without_locks(server, app, folder, references):
    answer = server.run(app, folder, kind="lockless", **begin(app, folder))
    assert (answer["status"], answer["error"]) == (0, None)
    found = outcome(app, folder)
    found["left"] = [name for name in found["left"] if name != ".training.lock"]
    assert difference(references[app][1], found) is None


def test_clock_set_back(server, folder, references):
    count, expected = references["mnist"]
    server.run("mnist", folder, at=count - 20, **begin("mnist", folder))
    files = checkpoints("mnist", folder)
    assert len(files) == 2
    # The first checkpoint seems to be the newest by years, the second from before the epoch.
    os.utime(files[0], (4e9, 4e9))
    os.utime(files[1], (1, 1))
    check_resumes(server, "mnist", folder, expected)


HOLD = """
import sys
from pathlib import Path
from dynsparse.apps.common.run import run_application
from dynsparse.apps.image_classification import Training, mnist
from rich.console import Console

class Waits(Console):
    def print(self, *text, **more):
        print("in", flush=True)
        sys.stdin.read()

mnist.run(mnist.Options(epochs=1, hidden_sizes=(8,), checkpoint_path=Path(sys.argv[1]),
                        records_path=Path(sys.argv[2])), Waits())
"""


@pytest.mark.parametrize("both", [True, False], ids=["checkpoints", "record alone"])
def test_second_writer_is_rejected(server, folder, references, both):
    paths = written("mnist", folder)
    places = [paths["checkpoint_path"], paths["records_path"]]
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, places[0] if both else str(folder / "other"), places[1]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with first:
        assert first.stdout.readline() == b"in\n"
        answer = server.run("mnist", folder, **begin("mnist", folder))
        assert answer["error"].startswith("BusyError: another training writes into ")
        assert f"process {first.pid} on " in answer["error"]
        assert checkpoints("mnist", folder) == []
        os.kill(first.pid, signal.SIGKILL)
    answer = server.run("mnist", folder, **begin("mnist", folder))
    assert answer["error"] is None
    shutil.rmtree(folder / "other", ignore_errors=True)
    assert difference(references["mnist"][1], outcome("mnist", folder)) is None
