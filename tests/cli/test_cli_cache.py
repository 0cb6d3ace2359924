"""`dynsparse cache`."""

import json

from dynsparse.cli.app import run
from dynsparse.files.cache import open_cache


def test_info_and_clear(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DYNSPARSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("DYNSPARSE_CACHE_SIZE", "1000")
    data = tmp_path / "mnist" / "images"
    data.parent.mkdir()
    data.write_text("downloaded")
    for kind in ("plans", "costs"):
        open_cache().put(kind, "a", b"x" * 100)
    assert run(["cache", "info", "--json"]) == 0
    one = {"entries": 1, "bytes": 184}
    assert json.loads(capsys.readouterr().out) == {
        "folder": str(tmp_path / "results"),
        "limit": 1000,
        "kinds": {"costs": one, "plans": one},
        "entries": 2,
        "bytes": 368,
    }
    assert run(["cache", "info"]) == 0
    out = capsys.readouterr().out
    assert str(tmp_path / "results") in out
    assert "plans  1 entry, 184 bytes" in out
    assert "together  2 entries, 368 bytes" in out
    assert "limit  1,000 bytes" in out
    assert run(["cache", "clear"]) == 0
    assert f"removed 2 entries, 368 bytes from {tmp_path}" in capsys.readouterr().out
    assert open_cache().kinds() == {}
    assert data.read_text() == "downloaded"


def test_a_wrong_size_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("DYNSPARSE_CACHE_SIZE", "1 GB")
    assert run(["cache", "info"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dynsparse: DYNSPARSE_CACHE_SIZE: expected a number of bytes")
    assert error.count("\n") == 1
