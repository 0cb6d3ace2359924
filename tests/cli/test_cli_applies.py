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
    "plan-ranks --outer-latency 1e-5": "--outer-latency: applies to several nodes",
    "plan-ranks --ranks 4 --ranks-per-node 4 --outer-bandwidth 1e9": "got one node: leave it out",
    "plan-ranks --json - --top 3": "--top: applies to the table, without --json -",
    "plan-ranks --measure a.json --ranks 8": "--ranks: applies to plans without --measure",
    "plan-ranks --measure a.json --flops 1e9": "--flops: applies to plans without --measure",
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


def test_two_nodes_have_links_between_them(capsys):
    line = "plan-ranks --ranks 4 --ranks-per-node 2 --outer-bandwidth 1e9 --features 64 64"
    assert run(line.split()) == 0
