"""Small benchmark grids from YAML to JSON; checks contents, never durations."""

import json
import sys

import pytest
import torch

from dynsparse.bench.results import (
    empty_results,
    load_results,
    save_results,
)
from dynsparse.bench.run import run_benchmark
from dynsparse.bench.spec import Benchmark, read_spec
from dynsparse.ops.linear.products import DEVICE_KINDS, KINDS

pytest.importorskip("yaml")

SPEC = """
defaults: {seconds: 0, rounds: 2, repeats: 0, foreign: 1}
benchmarks:
  steps:
    about: some layers
    measure: step
    contenders: [masked, dense]
    grid:
      - {layer: [256, 256x512], batch: 128, density: [0.05, 0.1, 0.2], block: [1, 4]}
      - {layer: 10, batch: 1, density: 0.5, block: [1, 4]}
  forwards: {about: f, measure: forward, grid: {layer: 16, batch: 2, density: 0.5, block: [1, 4]}}
  network: {about: n, measure: network, grid: {layer: 20-8-4, batch: 2, density: 0.5}}
  updates: {about: u, measure: update, grid: {layer: 16, batch: 2, density: 0.5, block: [1, 4]}}
  command: {about: c, command: [python, -c, "print('done')"]}
"""
SPREAD = {"median", "low", "high"}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    (folder / "b.yml").write_text(SPEC)
    spec = read_spec(folder / "b.yml")
    found = empty_results(spec.file)
    for benchmark in spec.benchmarks.values():
        found["benchmarks"][benchmark.name] = run_benchmark(
            benchmark, folder, tell=lambda line: None
        )
    return found


def test_json_schema(results, tmp_path):
    save_results(results, tmp_path / "a.json")
    data = load_results(tmp_path / "a.json")
    assert (data["format"], data["version"], data["spec"]) == ("dynsparse-bench", 1, "b.yml")
    assert {"processor", "cores", "isa", "kernels", "versions", "mkl"} <= data["machine"].keys()
    for name in ("steps", "forwards", "network", "updates"):
        benchmark = data["benchmarks"][name]
        assert {"about", "measure", "reference", "measured", "refused"} < benchmark.keys()
        assert benchmark["cells"]
        for cell in benchmark["cells"]:
            assert {"layer", "features", "batch", "density", "block", "threads", "dtype", "kernel",
                    "rounds", "foreign", "disturbed"} < cell.keys()  # fmt: skip
            assert cell["ratios"].keys() == cell["times"].keys() - {benchmark["reference"]}
            for spread in (*cell["times"].values(), *cell["ratios"].values()):
                assert spread.keys() == SPREAD
                assert 0 < spread["low"] <= spread["median"] <= spread["high"]


def test_invalid_cells_are_skipped(results):
    steps = results["benchmarks"]["steps"]
    assert steps["refused"] == [
        {
            "cell": "10, batch 1, density 0.5, block 4",
            "why": "block 4 does not divide 10 features",
        }
    ]
    assert len(steps["cells"]) == 13


def test_kernels_are_those_of_the_layers(results):
    known = {*KINDS, *DEVICE_KINDS, "bfloat16", "torch"}
    for name in ("steps", "forwards", "network", "updates"):
        for cell in results["benchmarks"][name]["cells"]:
            assert set(cell["kernel"].replace("; ", ", ").split(", ")) <= known
            assert cell["kernel"]


def test_command_output_or_figures_are_stored(results, tmp_path):
    assert results["benchmarks"]["command"]["output"] == "done\n"
    write = "import sys; open(sys.argv[1], 'w').write('[1, 2]')"
    benchmark = Benchmark("c", "c", command=("python", "-c", write, "{json}"))
    assert run_benchmark(benchmark, tmp_path, tell=lambda _: None)["figures"] == [1, 2]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ((sys.executable, "-c", "raise SystemExit('too little')"), "got 1: too little"),
        (("no-such-program",), "expected a program, got 'no-such-program'"),
    ],
)
def test_failing_command_raises_a_one_line_error(tmp_path, command, message):
    with pytest.raises(ValueError, match="benchmark 'c', command: expected") as caught:
        run_benchmark(Benchmark("c", "c", command=command), tmp_path, tell=lambda _: None)
    assert message in str(caught.value)


def test_threads_override_the_file_and_are_restored(tmp_path):
    (tmp_path / "b.yml").write_text(
        "benchmarks: {a: {about: x, measure: forward, seconds: 0, rounds: 1, "
        "grid: {layer: 8, batch: 2, density: 0.5, threads: [1, 2]}}}"
    )
    (benchmark,) = read_spec(tmp_path / "b.yml").benchmarks.values()
    before = torch.get_num_threads()
    lines: list[str] = []
    found = run_benchmark(benchmark, tmp_path, threads=3, tell=lines.append)
    assert [cell["threads"] for cell in found["cells"]] == [3]
    assert "8, batch 2, density 0.5, 3 threads: dynsparse" in lines[-1]
    assert torch.get_num_threads() == before


def test_disturbed_cells_are_named(tmp_path, monkeypatch):
    (tmp_path / "b.yml").write_text(
        "benchmarks: {a: {about: x, measure: forward, seconds: 0, rounds: 1, repeats: 1, "
        "grid: {layer: 8, batch: 2, density: 0.5}}}"
    )
    (benchmark,) = read_spec(tmp_path / "b.yml").benchmarks.values()
    monkeypatch.setattr("dynsparse.bench.timing.foreign_share", lambda before, after: 0.5)
    lines: list[str] = []
    found = run_benchmark(benchmark, tmp_path, tell=lines.append)
    assert found["cells"][0]["disturbed"]
    assert lines[-1].endswith("DISTURBED: others took 50 % of the machine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON written by dynsparse bench, got none"),
        ("[]", "expected JSON written by dynsparse bench, got another"),
        ('{"format": "dynsparse-bench", "version": 9}', "expected version 1, got 9"),
        ('{"format": "dynsparse-bench", "version": 1}', "expected the entry 'machine', got none"),
    ],
)
def test_other_file_raises(tmp_path, text, message):
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="expected") as caught:
        load_results(file)
    assert message in str(caught.value)


def test_figures_are_rounded(results, tmp_path):
    save_results({**results, "benchmarks": {"a": {"x": [0.123456789, 3]}}}, tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["benchmarks"]["a"]["x"] == [0.1235, 3]
