"""Options of the commands that train nothing: what would be ignored is refused in one line."""

import json

import pytest

pytest.importorskip("typer")

from dynsparse.cli.app import run

WRONG = {
    "bench --list --threads 2": "--list measures nothing: leave out --threads",
    "bench --list --benchmark quick --json a.json": "leave out --benchmark, --json",
    "bench --from a.json --json b.json": "--json writes what is measured, and --from",
    "encode --output a.tokens --data text --vocabulary chars.tokens --bpe-dir .": "got char tokens",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_would_be_ignored_is_refused(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("some text to encode")
    (tmp_path / "a.json").write_text(json.dumps({}))
    assert run(["encode", "--data", "text", "--output", "chars.tokens"]) == 0
    capsys.readouterr()
    assert run(line.split()) == 2
    told = capsys.readouterr().err
    assert WRONG[line] in told
    assert "leave" in told or "expected" in told
    assert told.count("\n") == 1
