"""benchmarks/gpu.py without a GPU: every section runs in Triton's interpreter, and an error in one
section does not affect others."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
WITHOUT_TRITON = "needs Triton (x86-64 Linux): make test-gpu-kernels"
SECTIONS = [
    "smoke 128", "smoke 64", "smoke 32", "smoke 16", "smoke updates", "smoke compiled",
    "ceilings", "kernels 64", "kernels 128", "kernels 32", "kernels 16",
    "steps", "dense way", "growth", "updates", "memory", "grid", "model", "training",
]  # fmt: skip


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=900
    )


@pytest.fixture
def part(monkeypatch):
    """Import a module of the benchmark."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return lambda name: importlib.import_module(f"gpu_parts.{name}")


@pytest.mark.slow
def test_dry_run_executes_every_section(tmp_path):
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    out = tmp_path / "results.json"
    done = run(str(FOLDER / "gpu.py"), "--dry", "--limit", "600", "--out", str(out))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())["sections"]
    assert {n: s["ended"] for n, s in found.items()} == dict.fromkeys(SECTIONS, "well")
    assert all(s["wrong"] == [] for s in found.values())
    rows = {name: {row["what"]: row for row in section["rows"]} for name, section in found.items()}
    # The checks tell errors and no times.
    checks = [r for n in SECTIONS[:6] for r in rows[n].values()]
    assert all(row["right"] and "us" not in row for row in checks)
    for b in (16, 32, 64, 128):
        for dtype in ("float32", "bfloat16", "float16"):
            assert len(rows[f"smoke {b}"][f"{b} {dtype} batch 70 by blocks"]["errors"]) >= 3
        for lie in ("transposed", "expanded", "odd address", "odd stride",
                    "float32 values in slots of any order"):  # fmt: skip
            # y, both gradients, and that of the values again with that of the bias
            assert len(rows[f"smoke {b}"][f"{b} {lie} by blocks"]["errors"]) == 5
    for what in ("an update of RigL", "a captured training over updates"):
        assert f"{what}, blocks of 64" in rows["smoke updates"]
    for what in ("blocks of 64", "blocks of 1", "a convolution"):
        assert f"compiled with reduce-overhead, {what}" in rows["smoke compiled"]
    # Each figure that is asked for has its row.
    for b in (16, 32, 64, 128):
        passes = {tuple(what.split()[1:3]) for what in rows[f"kernels {b}"] if what[0].isdigit()}
        for what in ("forward", "grad_input", "grad_weight"):
            assert {(what, numbers) for numbers in ("16-bit", "tf32", "tf32x3")} <= passes
        assert ("with", "bias") in passes
        timed = [row for row in rows[f"kernels {b}"].values() if "share" in row]
        assert all({"us", "p10", "p90", "dense", "bound", "error"} <= row.keys() for row in timed)
        for numbers in ("16-bit", "tf32", "tf32x3"):
            wanted = {f"for the table {numbers}", f"shares of the bounds, {numbers}"}
            assert wanted <= rows[f"kernels {b}"].keys()
        assert any("tma=True" in what for what in rows[f"kernels {b}"]) == (b >= 32)
        assert any(f"blocks of {b}, bfloat16, captured" in what for what in rows["steps"])
    assert {"host: forward over blocks", "for costs.py"} <= rows["ceilings"].keys()
    assert {"4 steps, RigL", "4 steps, dense", "4 steps, masked"} <= rows["training"].keys()
    assert rows["training"]["4 steps, RigL"]["updates"] > 0
    assert rows["grid"]["the grid"]["cells"] == 4


@pytest.mark.slow
def test_step_writes_its_results(tmp_path):
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    env = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(FOLDER / "gpu_run.sh"), "grid", "--dry"],
        capture_output=True, text=True, check=False, timeout=900, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads((tmp_path / "grid.json").read_text())["sections"]["grid"]["ended"] == "well"
    assert "the grid" in (tmp_path / "grid.log").read_text()
    assert tarfile.is_tarfile(tmp_path / "kernels.tgz")


def test_steps_of_the_run_are_sections():
    text = (FOLDER / "gpu_run.sh").read_text()
    for line in re.findall(r"^ +measure (.*)$", text, re.M):
        words = shlex.split(line)[1:]
        named = [w for w in words[: words.index("--limit")] if w not in ("--smoke", "$step")]
        assert set(named) <= set(SECTIONS)
    steps = re.findall(r"^#   bash benchmarks/gpu_run.sh (\w+)", text, re.M)
    page = (FOLDER.parent / "docs" / "gpu.md").read_text()
    assert re.findall(r"^bash benchmarks/gpu_run.sh (\w+)", page, re.M) == steps
    done = subprocess.run(
        ["bash", str(FOLDER / "gpu_run.sh"), "stpes"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"expected {', '.join(steps[:-1])} or {steps[-1]}, got stpes" in done.stdout


BROKEN = """
import runpy, sys, os
sys.argv = ["gpu.py", "--dry", *sys.argv[1:]]
names = runpy.run_path({path!r}, run_name="gpu")
def raises(run):
    raise RuntimeError("planted")
def wrong(run):
    run.wrong("some kernel", AssertionError("an error of 1"))
def lost(run):
    run.case("before", lambda: run.note("before", us=1.0))
    run.case("culprit", lambda: os._exit(3))
    run.case("after", lambda: run.note("after", us=1.0))
def hangs(run):
    run.note("begun")
    import time; time.sleep(600)
changed = names["main"].__globals__
changed["__file__"] = {script!r}
changed["all_sections"] = lambda: {{
    "raises": raises, "wrong": wrong, "ends": lambda run: os._exit(3), "lost": lost, "hangs": hangs,
    "last": lambda run: run.note("was reached", us=1.0)}}
sys.exit(names["main"]())
"""


WITHOUT = """
import runpy, sys
from importlib import util
found = util.find_spec
util.find_spec = lambda name, package=None: None if name == "triton" else found(name, package)
sys.argv = ["gpu.py", "--dry"]
runpy.run_path({path!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_failing_or_hanging_section_keeps_other_results(tmp_path):
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    script, out = tmp_path / "broken.py", tmp_path / "results.json"
    script.write_text(BROKEN.format(path=str(FOLDER / "gpu.py"), script=str(script)))
    done = run(str(script), "--limit", "40", "--out", str(out))
    assert done.returncode == 1, done.stderr
    found = json.loads(out.read_text())["sections"]
    assert {name: section["ended"] for name, section in found.items()} == {
        "raises": "exit status 1", "wrong": "well", "ends": "exit status 3", "lost": "well",
        "hangs": "not within 40 s", "last": "well",
    }  # fmt: skip
    assert [row["what"] for row in found["hangs"]["rows"]] == ["begun"]
    assert found["last"]["rows"] == [{"what": "was reached", "us": 1.0}]
    # What comes after a case that ends the process is done by another, without it.
    assert {row["what"] for row in found["lost"]["rows"]} == {"before", "after"}
    assert found["lost"]["wrong"] == ["culprit"]
    assert found["wrong"]["wrong"] == ["some kernel"]
    assert "an error of 1" in found["wrong"]["problems"][0]["trace"]
    assert "planted" in done.stderr
    assert "wrong: 5 " in done.stdout
    assert not list(tmp_path.glob("*.part"))


def test_unknown_sections_raise():
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    done = run(str(FOLDER / "gpu.py"), "--dry", "stpes")
    assert done.returncode == 2
    assert "got stpes" in done.stdout


def test_without_gpu_raises():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    done = run(str(FOLDER / "gpu.py"))
    assert (done.returncode, done.stderr) == (2, "")
    assert "expected a CUDA device, found none: --dry runs on a CPU" in done.stdout


def test_without_triton_raises():
    done = run("-c", WITHOUT.format(path=str(FOLDER / "gpu.py")))
    assert (done.returncode, done.stderr) == (2, "")
    assert "expected Triton, found none: pip install triton" in done.stdout


def test_candidate_names_match_table_rows(part):
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    from dynsparse.ops.linear.cuda.configurations import Gradient, Rows

    for config in (Rows(128, 64, 4, 3, group=2), Gradient(1, 32, 8, 4)):
        name = str(part("kernels").Job("forward", 64, "16-bit", config))
        assert eval(name, {"Rows": Rows, "Gradient": Gradient}) == config
        assert "split" not in name
