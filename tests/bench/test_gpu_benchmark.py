"""benchmarks/gpu.py without a GPU: every section runs, in Triton's interpreter, and errors stay
where they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dynsparse.ops.linear.costs import Layer
from dynsparse.ops.linear.cuda.costs import seconds
from dynsparse.ops.linear.cuda.rates import RATES

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
WITHOUT_TRITON = "needs Triton (x86-64 Linux): make test-gpu-kernels"
SECTIONS = [
    "ceilings", "correctness", "blocks 128", "blocks 64", "blocks 32", "blocks 16", "steps",
    "float32", "dense way", "growth", "updates", "graphs", "memory", "transformer", "training",
    "grid", "refine",
]  # fmt: skip


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=400
    )


@pytest.mark.slow
def test_a_dry_run_goes_through_every_section(tmp_path):
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    out = tmp_path / "results.json"
    done = run(str(FOLDER / "gpu.py"), "--dry", "--out", str(out))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert {n: s["ended"] for n, s in found["sections"].items()} == dict.fromkeys(SECTIONS, "well")
    assert "problems" not in found, found["problems"]
    assert found["wrong"] == 0
    rows = found["rows"]
    assert {row["section"] for row in rows} == {
        s.split(" ")[0] if "blocks" in s else s for s in SECTIONS
    } - {"refine"}
    assert all(row.get("right", "yes") == "yes" for row in rows)
    checked = [row for row in rows if row["section"] == "correctness"]
    assert {row["what"].split(",")[0].split(" batch")[0] for row in checked} == {
        *(f"blocks {b} {d}" for b in (16, 32, 64, 128) for d in ("float32", "bfloat16", "float16")),
        "growth",
    }
    assert {*found["best"]} == {
        f"{b} {what}"
        for b in (16, 32, 64, 128)
        for what in ("forward", "grad_input", "grad_weight")
    }
    assert {"ratio", "share", "us", "config"} <= found["best"]["64 forward"].keys()
    # Each figure that is asked for has its row.
    what = {(row["section"], row["what"].split(" (")[0].split(",")[0]) for row in rows}
    assert {("steps", f"blocks {b}") for b in (4, 8, 16, 32, 64, 128)} | {
        *(("float32", f"{b} {p}") for b in (32, 64, 128) for p in ("forward", "grad_weight")),
        *(("growth", f"scores of blocks of {b}") for b in (16, 32, 64)),
        *(("updates", "a whole update") for _ in (1,)),
        *(("memory", f"training state of blocks of {b}") for b in (1, 8, 64)),
        ("steps", "elements"),
        ("graphs", "a captured training over updates of RigL"),
        ("transformer", "blocks of 64"),
        ("grid", "128 x 128"),
    } <= what
    state = {r["what"].split(",")[0]: r for r in rows if r["section"] == "memory"}
    # On the CPU the order by columns is there, too: 12 bytes of index.
    share = state["training state of blocks of 1"]["share_of_dense"]
    assert share == pytest.approx(0.3 * 28 / 16, rel=0.02)
    page = out.with_suffix(".md").read_text()
    assert "### blocks 64" in page
    assert "| 64 forward " in page
    assert "training state of blocks of 8" in page
    # A run without a GPU measures nothing that may replace what is expected of one.
    assert found["rates"]["measured"] is False
    assert not any("expected" in row for row in rows)


BROKEN = """
import runpy, sys
sys.argv = ["gpu.py", "--dry", "--out", sys.argv[1]]
names = runpy.run_path({path!r}, run_name="gpu")
def fails():
    raise RuntimeError("planted")
def works(run):
    run.note("last", "was reached", 1.0, dense=2.0)
names["measure"].__globals__["sections"] = lambda run: {{
    "first": fails, "wrong": lambda: run.state.update(wrong=1), "last": lambda: works(run)}}
sys.exit(names["main"]())
"""


def test_a_section_that_fails_loses_nothing_else(tmp_path):
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    out = tmp_path / "results.json"
    done = run("-c", BROKEN.format(path=str(FOLDER / "gpu.py")), str(out))
    assert done.returncode == 1, done.stderr  # a result was wrong
    found = json.loads(out.read_text())
    ended = {name: section["ended"] for name, section in found["sections"].items()}
    assert ended == {"first": "RuntimeError: planted", "wrong": "well", "last": "well"}
    assert found["rows"] == [
        {"section": "last", "what": "was reached", "us": 1.0, "dense_us": 2.0, "ratio": 2.0}
    ]
    assert found["problems"][0]["what"] == "first"
    assert "planted" in found["problems"][0]["trace"]
    assert not list(tmp_path.glob("*.part"))


LOST = """
import argparse, runpy, sys
sys.argv = ["gpu.py", "--dry"]
names = runpy.run_path({path!r}, run_name="gpu")
commands = []
names["os"].execv = lambda program, command: commands.append(command)
from gpu_parts.run import Run
from pathlib import Path
args = argparse.Namespace(budget=100.0, began=1.0, out=Path({out!r}), only=[])
run = Run(True, 100.0, args.out, 1.0)
assert run.tries("64 forward")
names["again"](args, run, ["ceilings", "blocks 64"])
assert not run.tries("64 forward")
names["again"](args, run, ["ceilings", "growth"])
for command in commands:
    print("|".join(command[command.index("--done") :]))
"""


def test_a_lost_device_costs_what_lost_it(tmp_path):
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    out = tmp_path / "results.json"
    done = run("-c", LOST.format(path=str(FOLDER / "gpu.py"), out=str(out)))
    assert done.returncode == 0, done.stderr
    # The section of the candidate is done again; one that said of nothing that it tries it, is not.
    lines = [line for line in done.stdout.splitlines() if line.startswith("--done")]
    assert lines == ["--done|ceilings", "--done|ceilings|growth"]
    assert json.loads(out.read_text())["skip"] == ["64 forward"]


def test_without_a_gpu_it_says_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(str(FOLDER / "gpu.py"))
    assert (done.returncode, done.stderr) == (2, "")
    assert "expected a CUDA device, found none: --dry runs on a CPU" in done.stdout


def test_what_is_expected_is_what_the_formula_said():
    """The figures were written down before anything was measured: 60 % of the bounds, and 5 us."""
    names: dict[str, dict] = {}
    exec((FOLDER / "gpu_parts" / "predictions.py").read_text(), names)
    for b in (16, 32, 64):
        layer = Layer(4096, 4096, round(0.1 * (4096 // b) ** 2), b)
        found = seconds("blocks", layer, 8192, "forward", "16-bit", RATES["90"])
        assert names["EXPECTED"][f"blocks {b}"] == round(found * 1e6)
