"""`dynsparse bench`: output, and one line with exit status 2 for user errors."""

import json
import re
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

from dynsparse.bench import run as run_module
from dynsparse.cli.app import run

pytest.importorskip("yaml")

SPEC = """
defaults: {seconds: 0, rounds: 1, repeats: 0}
benchmarks:
  one:
    about: a layer
    measure: step
    contenders: [masked]
    grid: {layer: 16, batch: 2, density: [0.1, 0.5]}
  two:
    about: another
    measure: forward
    contenders: [dense]
    grid: {layer: 8, batch: 1, density: 1}
  both: {about: both, runs: [one, two]}
"""


@pytest.fixture(autouse=True)
def _folder(monkeypatch, tmp_path):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.yml").write_text(SPEC)
    (tmp_path / "bad.yml").write_text("benchmarks: {a: {about: x, measure: fly}}")
    (tmp_path / "letter.txt").write_text("dear reader")


def call(capsys, line):
    status = run(["bench", *line.split()])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_measures_prints_and_writes(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    status, out, err = call(capsys, "--spec b.yml --json a.json --plot a.png --markdown a.md")
    assert (status, err) == (0, "")
    assert "Python" in out.splitlines()[0]
    assert "3 cells, at least 0 s" in out.splitlines()[1]
    assert "[1/2] 16, batch 2, density 0.1, 1 thread: dynsparse" in out
    assert " s left" in out
    data = json.loads((tmp_path / "a.json").read_text())
    assert list(data["benchmarks"]) == ["one", "two"]
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert "## two" in (tmp_path / "a.md").read_text()


def test_documentation_lists_every_option(capsys):
    _, out, _ = call(capsys, "--help")
    options = set(re.findall(r"(--[a-z]+) ", out)) - {"--help"}
    text = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
    assert len(options) >= 9
    assert all(f"| `{option}" in text for option in options)


@pytest.mark.slow
def test_one_benchmark_or_several(capsys, tmp_path):
    assert call(capsys, "--spec b.yml --benchmark two --json a.json")[0] == 0
    assert list(json.loads((tmp_path / "a.json").read_text())["benchmarks"]) == ["two"]
    assert call(capsys, "--spec b.yml --benchmark one two --threads 2 --json a.json")[0] == 0
    data = json.loads((tmp_path / "a.json").read_text())
    assert [c["threads"] for b in data["benchmarks"].values() for c in b["cells"]] == [2, 2, 2]


def test_merge_keeps_other_cells(capsys, tmp_path):
    assert call(capsys, "--spec b.yml --benchmark two --json a.json --merge")[0] == 0
    assert call(capsys, "--spec b.yml --benchmark one --json a.json --merge")[0] == 0
    data = json.loads((tmp_path / "a.json").read_text())
    assert set(data["benchmarks"]) == {"one", "two"}
    data["machine"]["isa"] = "other"
    (tmp_path / "a.json").write_text(json.dumps(data))
    status, _, err = call(capsys, "--spec b.yml --benchmark one --json a.json --merge")
    assert status == 2
    assert "measured on another machine" in err


def test_cells_measured_separately_are_merged_in_order(capsys, tmp_path):
    def cells():
        data = json.loads((tmp_path / "a.json").read_text())
        return {name: b["cells"] for name, b in data["benchmarks"].items()}

    line = ["bench", "--spec", "b.yml", "--benchmark", "one", "--json", "a.json", "--merge"]
    assert run([*line, "--cell", "density 0.5"]) == 0
    first = cells()
    assert [c["density"] for c in first["one"]] == [0.5]
    assert run([*line, "--cell", "16, block 1, float32, density 0.1"]) == 0
    assert [c["density"] for c in cells()["one"]] == [0.1, 0.5]
    assert cells()["one"][1] == first["one"][0]
    capsys.readouterr()
    assert run([*line, "--cell", "density 0.3"]) == 2
    assert "such as '16, batch 2, density 0.1' or a part of it, got 'density 0.3'" in (
        capsys.readouterr().err
    )


def test_interrupted_run_keeps_measured_cells(capsys, tmp_path, monkeypatch):
    measure = run_module._measure_cell

    def until(benchmark, cell):
        if cell.density == 0.5:
            raise KeyboardInterrupt
        return measure(benchmark, cell)

    monkeypatch.setattr(run_module, "_measure_cell", until)
    with suppress(KeyboardInterrupt):
        call(capsys, "--spec b.yml --benchmark one --json a.json")
    data = json.loads((tmp_path / "a.json").read_text())
    assert [c["density"] for c in data["benchmarks"]["one"]["cells"]] == [0.1]


def test_figures_can_be_drawn_without_measuring(capsys, tmp_path):
    assert call(capsys, "--spec b.yml --benchmark one --json a.json")[0] == 0
    status, out, err = call(capsys, "--from a.json --markdown a.md")
    assert (status, out, err) == (0, "", "")
    assert "## one" in (tmp_path / "a.md").read_text()


def test_unknown_load_is_reported(capsys, monkeypatch):
    monkeypatch.setattr("dynsparse.bench.host.read_cpu_times", lambda: None)
    status, out, _ = call(capsys, "--spec b.yml --benchmark two")
    assert status == 0
    assert "no /proc/stat: the load by other processes is not known" in out


def test_list_measures_nothing(capsys):
    status, out, _ = call(capsys, "--spec b.yml --list")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["benchmark", "one", "two", "both"]
    status, out, _ = call(capsys, "--list")
    assert status == 0
    assert "quick" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--spec bad.yml", "bad.yml, benchmark 'a', measure: expected one of step"),
        ("--spec letter.txt", "letter.txt, the file: expected a mapping, got 'dear reader'"),
        ("--spec b.yml --benchmark three", "expected one of one, two, both (b.yml), got 'three'"),
        (
            "--spec b.yml --json no/a.json",
            "--json: expected a file in a folder that can",
        ),
        ("--spec b.yml --merge", "--merge adds what is measured to a --json file"),
        ("--from letter.txt", "letter.txt: expected JSON written by dynsparse bench"),
        ("--from a.json --spec b.yml", "--from measures nothing: leave out --spec"),
        ("--from a.json --cell 16", "--from measures nothing: leave out --cell"),
        ("--from a.json --json b.json", "--json writes what is measured, and --from"),
        ("--list --threads 2", "--list measures nothing: leave out --threads"),
        ("--list --benchmark quick --json a.json", "leave out --benchmark, --json"),
        ("--loud", "No such option"),
    ],
)
def test_wrong_calls_print_one_line_and_exit_with_2(capsys, line, message):
    status, out, err = call(capsys, line)
    assert (status, out) == (2, "")
    assert err.startswith("dynsparse: ")
    assert err.count("\n") == 1
    assert message in err


def test_invalid_figures_print_one_line(capsys, tmp_path):
    head = {"format": "dynsparse-bench", "version": 1, "spec": "x", "machine": {}}
    for content in (
        "[" * 100_000,
        json.dumps({**head, "benchmarks": {"a": {}}}),
        json.dumps({**head, "benchmarks": {"a": {"measure": "step", "cells": [1]}}}),
        json.dumps({**head, "benchmarks": [], "version": "x" * 10_000}),
    ):
        (tmp_path / "f.json").write_text(content)
        status, _, err = call(capsys, "--from f.json --markdown o.md")
        assert status == 2
        assert "f.json" in err
        assert err.count("\n") == 1
        assert len(err) < 1000
