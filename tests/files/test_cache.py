"""Results kept on the disk: found again, bounded, safe under two processes, and never a fault."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynsparse.files import cache
from dynsparse.files.cache import Cache, Kept, cache_folder, open_cache


@pytest.fixture
def kept(tmp_path):
    return Cache(tmp_path / "results", 1 << 20)


def entry(kept: Cache, kind: str = "plans") -> Path:
    (found,) = (kept.folder / kind).iterdir()
    return found


def test_what_was_put_is_found_by_kind_and_key_and_by_no_other(kept):
    assert kept.get("plans", "a") is None
    assert kept.put("plans", "a", b"\0one\n")
    assert kept.put("costs", "a", b"")
    assert kept.get("plans", "a") == b"\0one\n"
    assert kept.get("costs", "a") == b""
    assert kept.get("plans", "b") is None
    assert kept.put("plans", "a", b"two")
    assert kept.get("plans", "a") == b"two"


def test_json_goes_in_and_comes_out(kept):
    value = {"a": [1, 2.5, None, True, "ä"]}
    assert kept.put_json("costs", "a", value)
    assert kept.get_json("costs", "a") == value
    assert kept.get_json("costs", "b") is None
    kept.put("costs", "a", b"{")
    assert kept.get_json("costs", "a") is None


@pytest.mark.parametrize("at", range(0, 105, 8))
def test_one_wrong_bit_or_a_missing_end_is_no_entry(kept, caplog, at):
    kept.put("plans", "a", b"the content itself, some twenty bytes")
    whole = entry(kept).read_bytes()
    for damaged in (
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :],
        whole[:at],
        whole + b"x",
    ):
        entry(kept).write_bytes(damaged)
        with caplog.at_level(logging.INFO, "dynsparse"):
            assert kept.get("plans", "a") is None
        assert "damaged" in caplog.messages[-1]
    kept.put("plans", "a", b"again")
    assert kept.get("plans", "a") == b"again"


def test_an_entry_under_another_name_is_damage(kept):
    kept.put("plans", "a", b"of a")
    first = entry(kept)
    kept.put("plans", "b", b"of b")
    (second,) = {*first.parent.iterdir()} - {first}
    first.replace(second)
    assert kept.get("plans", "b") is None


def test_the_least_recently_used_go_first(tmp_path):
    kept = Cache(tmp_path, 3 * 184)  # three entries of 100 bytes
    for age, key in enumerate("abc"):
        kept.put("plans", key, key.encode() * 100)
        for file in (tmp_path / "plans").iterdir():
            if kept._path("plans", key) == file:
                os.utime(file, (1000 + age, 1000 + age))
    assert kept.kinds() == {"plans": Kept(3, 3 * 184)}
    assert kept.get("plans", "a")  # used: now b is the oldest
    kept.put("costs", "d", b"d" * 100)
    assert kept.get("plans", "b") is None
    assert kept.get("plans", "a")
    assert kept.get("plans", "c")
    assert kept.get("costs", "d")
    assert kept.kinds() == {"costs": Kept(1, 184), "plans": Kept(2, 2 * 184)}
    assert not kept.put("plans", "e", b"e" * 600)  # more than there may be of all
    assert sum(one.entries for one in kept.kinds().values()) == 3


def test_clearing_removes_entries_and_what_kills_have_left_and_nothing_else(kept):
    kept.put("plans", "a", b"x")
    kept.put("costs", "b", b"y")
    left = entry(kept).with_name(f".{entry(kept).name}.0123abcd.tmp")
    left.write_bytes(b"half")
    own = kept.folder / "plans" / "notes.txt"
    own.write_text("mine")
    assert kept.clear().entries == 2
    assert [file for file in kept.folder.rglob("*") if file.is_file()] == [own]
    assert kept.clear() == Kept(0, 0)
    assert kept.kinds() == {}


def test_what_a_kill_has_left_goes_when_it_is_old(kept):
    kept.put("plans", "a", b"x")
    old, new = (entry(kept).with_name(f".{entry(kept).name}.0123abc{i}.tmp") for i in "de")
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (0, 0))
    kept.put("plans", "b", b"y")
    assert not old.exists()
    assert new.exists()


def test_a_folder_that_cannot_be_written_is_an_empty_cache(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    kept = Cache(tmp_path / "file" / "results", 1 << 20)
    with caplog.at_level(logging.INFO, "dynsparse"):
        assert not kept.put("plans", "a", b"x")
        assert "keeps nothing" in caplog.messages[-1]
        assert kept.get("plans", "a") is None
    assert kept.kinds() == {}
    assert kept.clear() == Kept(0, 0)


def test_a_disk_that_is_full_is_told_in_the_log(kept, caplog, monkeypatch):
    def full(path, write):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "write_whole", full)
    with caplog.at_level(logging.INFO, "dynsparse"):
        assert not kept.put("plans", "a", b"x")
    assert "No space left" in caplog.text


def test_the_environment_says_where_and_how_much(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNSPARSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("DYNSPARSE_CACHE_SIZE", "12345")
    assert cache_folder() == tmp_path
    assert open_cache().folder == tmp_path / "results"
    assert open_cache().limit == 12345
    monkeypatch.delenv("DYNSPARSE_CACHE_SIZE")
    assert open_cache().limit == 256 << 20
    monkeypatch.delenv("DYNSPARSE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert cache_folder() == tmp_path / "xdg" / "dynsparse"


@pytest.mark.parametrize("size", ["a lot", "-1", "1e6", "1.5", "9" * 20, "٣"])
def test_a_size_that_is_none_is_refused(monkeypatch, size):
    monkeypatch.setenv("DYNSPARSE_CACHE_SIZE", size)
    with pytest.raises(ValueError, match="DYNSPARSE_CACHE_SIZE: expected a number of bytes"):
        open_cache()


def test_size_0_keeps_and_finds_nothing(tmp_path):
    Cache(tmp_path, 1 << 20).put("plans", "a", b"x")
    off = Cache(tmp_path, 0)
    assert off.get("plans", "a") is None
    assert not off.put("plans", "b", b"y")
    assert Cache(tmp_path, 1 << 20).get("plans", "a") == b"x"


HAMMER = """
import sys
from pathlib import Path
from dynsparse.files.cache import Cache

kept = Cache(Path(sys.argv[1]), 3000)
print("ready", flush=True)
sys.stdin.readline()
for turn in range(150):
    key = str(turn % 7)
    found = kept.get("plans", key)
    assert found in (None, key.encode() * 700), found
    kept.put("plans", key, key.encode() * 700)
"""


def test_two_processes_read_write_and_make_room_in_one_folder(tmp_path):
    """Room for three of seven entries, so that each removes what the other reads and writes."""
    both = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", HAMMER, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for one in both:
            assert one.stdout.readline() == "ready\n"
        for one in both:
            one.stdin.write("go\n")
            one.stdin.flush()
        for one in both:
            _, err = one.communicate(timeout=300)
            assert (one.returncode, err) == (0, "")
    finally:
        for one in both:
            one.kill()
            one.wait()
    kept = Cache(tmp_path, 3000)
    assert 0 < kept.kinds()["plans"].bytes <= 3000
    assert all(len(file.name) == 64 for file in (tmp_path / "plans").iterdir())
