"""The figures on docs/gpu.md are measured ones, and its commands exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from page_tables import cells_of

from dynsparse.ops.linear.cuda.dense import KEPT_LINES, PANEL_BYTES

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "gpu.md").read_text()
TOLD = " ".join(PAGE.split())
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "gpu-h100.json").read_text())["sections"]


def rows(section: str) -> dict[str, dict]:
    return {row["what"]: row for row in MEASURED[section]}


def test_layer_figures_match_measurements():
    steps = rows("steps")
    for b, *ratios in cells_of("gpu.md", "| blocks | times faster than masked dense "):
        wanted = []
        for dtype in ("bfloat16", "autocast"):
            row = steps.get(f"step, blocks of {b}, {dtype}, captured")
            wanted += [f"{row[k]:.2f}" if row else "" for k in ("over_masked", "over_dense")]
        assert ratios == wanted


def test_model_figures_match_measurements():
    measured, model = rows("model"), ""

    def ratio(model: str, what: str, mode: str) -> str:
        step = f"a compiled step of {model}, {{}}{mode}".format
        row = measured.get(step(what))
        return "" if row is None else f"{measured[step('dense')]['us'] / row['us']:.2f}"

    found = cells_of("gpu.md", "| model | blocks | density ")
    assert len(found) == sum("dense" not in w and "reduce-overhead" not in w for w in measured)
    for name, b, density, with_graphs, without, memory in found:
        model = name.partition(" (")[0] or model
        what = f"blocks of {b}, density {density}"
        assert with_graphs == ratio(model, what, ", reduce-overhead")
        row = measured[f"a compiled step of {model}, {what}"]
        assert (without, memory) == (f"{row['over_dense']:.2f}", f"{row['of_dense']:.2f}")
    sparse, dense = (rows("training")[f"500 steps, {how}"] for how in ("RigL", "dense"))
    assert f"included, {dense['us'] / sparse['us']:.2f} times as fast as dense" in TOLD
    assert f"{sparse['last_loss']:.2f} with RigL, {dense['last_loss']:.2f} dense" in TOLD


def test_limits_of_models_match_measurements():
    us = {what: row["us"] for what, row in rows("profile").items()}
    kernels = sum(t for what, t in us.items() if what.startswith("device, of it"))
    whole = us["device, a step of GPT-2 medium, blocks of 64, density 0.1, reduce-overhead"]
    assert f"take {kernels / whole:.0%} of the device's time".replace("%", " %") in TOLD
    tiles, _, linear = (t / 1e3 for what, t in us.items() if what.startswith("host"))
    assert f"took the host of this H100 {tiles:.2f} ms for each kernel" in TOLD
    assert f"it took {tiles:.2f} ms for each kernel" in TOLD
    assert f"{linear:.2f} ms for `linear`" in TOLD


def test_grid_matches_measurements():
    cells = [row for row in MEASURED["grid"] if "over_dense" in row]
    slower = sum(row["over_masked"] < 0.98 for row in cells)
    assert f"{len(cells)} random cells" in TOLD
    assert f"{slower} cells are more than 2 % slower" in TOLD
    parts = r"(\d+) features, (\d+) samples, density ([\d.]+), blocks of (\d+), (\w+)"
    found = [(*re.match(parts, row["what"]).groups(), row) for row in cells]
    large = [row["over_dense"] for n, _, density, b, _, row in found
             if int(b) >= 64 and int(n) >= 2048 and float(density) <= 0.2]  # fmt: skip
    assert f"are {min(large):.2f} to {max(large):.0f} times faster" in TOLD
    small = [row["over_masked"] for n, batch, *_, way, row in found
             if (n, batch, way) == ("1024", "512", "backward")]  # fmt: skip
    assert f"{min(small):.1f} to {max(small):.1f} of the speed of masked" in TOLD


def test_readme_figures_match_measurements():
    steps = rows("steps")
    ratios = [steps[f"step, blocks of {b}, bfloat16, captured"]["over_masked"] for b in (64, 128)]
    told = " ".join((ROOT / "README.md").read_text().split())
    assert "is {:.1f} and {:.1f} times as fast as a masked one".format(*ratios) in told
    us = {what: row["us"] for what, row in rows("model").items()}
    step = "a compiled step of GPT-2 medium, {}, reduce-overhead".format
    ratio = us[step("dense")] / us[step("blocks of 64, density 0.1")]
    assert f"GPT-2 medium {int(10 * ratio) / 10} times as fast as dense, with CUDA graphs" in told


def test_numbers_match_the_code():
    for number in (f"{KEPT_LINES:,} lines", f"{PANEL_BYTES >> 20} MiB"):
        assert number in TOLD


def test_commands_and_sections_match_the_benchmark():
    pytest.importorskip("triton", reason="needs Triton (x86-64 Linux): make test-gpu-kernels")
    script = ROOT / "benchmarks" / "gpu.py"
    lines = re.findall(r"python3 benchmarks/gpu\.py([^#\n]*)", PAGE)
    names = subprocess.run(
        [sys.executable, "-c", f"import runpy; print(*runpy.run_path({str(script)!r})"
         "['all_sections'](), sep='\\n')"],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    told = re.findall(r"^\| (`[^|]*) \|", PAGE.partition("| section |")[2].partition("#")[0], re.M)
    listed = [name for cell in told for name in re.findall(r"`([^`]*)`", cell)]
    assert set(listed) <= set(names)
    assert {name.split()[0] for name in names} == {name.split()[0] for name in listed}
    help_ = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert len(lines) == 6
    for line in lines:
        words = line.split()
        for i, word in enumerate(words):
            value = i > 0 and words[i - 1] in ("--out", "--limit", "--tokens")
            assert value or (word in help_ if word.startswith("--") else word in names)
