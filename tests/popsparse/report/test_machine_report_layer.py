"""The report page of a layer, and `dynsparse matmul --report`."""

from __future__ import annotations

import json

import pytest
import torch
from machine_pages import Page

from dynsparse import SparsePattern
from dynsparse.cli.app import run
from popsparse.layer import Layer
from popsparse.machine import Target
from popsparse.planning.params import FullyConnectedParams, SparsityParams
from popsparse.planning.search import make_plan
from popsparse.planning.search import plan as make
from popsparse.report import write_layer_report

COMMAND = "matmul --rows 128 --cols 96 --batch 32 --density 0.2 --block-size 8 --tiles 16"
SMALL = COMMAND.split()


def words(path) -> str:
    return Page(path.read_text("utf-8")).words


def data(path) -> dict:
    return Page(path.read_text("utf-8")).data


@pytest.mark.parametrize("groups", [1, 2])
def test_all_passes_of_a_layer(tmp_path, groups):
    params = FullyConnectedParams.create_with_nz_ratio(
        SparsityParams(4),
        nz_ratio=0.25,
        batch_size=16,
        num_groups=groups,
        input_channels_per_group=48,
        output_channels_per_group=64,
    )
    options = {"do_grad_a_pass": True, "do_grad_w_pass": True}
    plan = make_plan(Target(tiles=12), "float32", params, options)
    layer = Layer(plan)
    patterns = [SparsePattern.random((64, 48), 0.25, block_size=4) for _ in range(groups)]
    values = [torch.ones(p.values_shape) for p in patterns]
    layer.set_weights(*((patterns, values) if groups > 1 else (patterns[0], values[0])))
    layer.forward(torch.ones(16, groups * 48))
    layer.grad_input(torch.ones(16, groups * 64))
    layer.grad_weight(torch.ones(16, groups * 64), torch.ones(16, groups * 48))
    path = write_layer_report(
        tmp_path / "page.html", layer, pattern=patterns if groups > 1 else patterns[0]
    )
    text = words(path)
    for name, profile in layer.profiles.items():
        assert f"{profile.cycles:,.0f} {name.replace('_', ' ')}" in text
        assert f"The machine took {profile.cycles:,.0f} (" in text
    nnz = sum(p.nnz for p in patterns) * 16
    assert f"Non-zero values {nnz:,}" in text
    assert "Sparse product 64 × 48 by 16 on custom" in text
    # Passes share the program and so its memory, which is shown once.
    assert "Memory: on every tile as in forward." in text
    assert "p0-memory" in data(path)["tiles"]
    assert "p1-memory" not in data(path)["tiles"]
    # Each pass is named by what happens in it, not by the pass.
    for timeline in data(path)["timelines"].values():
        assert len({name for *_, name in timeline["phases"]}) > 1


def test_layer_without_profile(tmp_path):
    layer = Layer(make(64, 48, 16, 0.25, 4, "float32", Target(tiles=12), passes=["forward"]))
    with pytest.raises(ValueError, match="set a sparse pattern and run a pass"):
        write_layer_report(tmp_path / "page.html", layer)


def test_matmul_report(tmp_path, capsys):
    path = tmp_path / "page.html"
    more = ["--passes", "forward,grad_input", "--json", "--report", str(path)]
    assert run([*SMALL, *more]) == 0
    figures = json.loads(capsys.readouterr().out)
    text = words(path)
    for name, cycles in figures["cycles"].items():
        assert f"{cycles:,.0f} {name.replace('_', ' ')}" in text
    assert f"Fullest tile {figures['max_tile_bytes']:,} B" in text
    assert f"Propagation steps {figures['propagation_steps']:,}" in text
    assert f"Blocks spilled {figures['spilled']:,}" in text
    assert f"Largest relative error {figures['max_relative_error']:.3g}" in text
    plan = figures["plan"]
    assert f"{plan['x']} × {plan['y']} × {plan['z']}" in text
    assert "Runners-up" in text


def test_report_of_several_seeds_shows_the_median(tmp_path, capsys):
    path = tmp_path / "page.html"
    more = ["--seeds", "3", "--density", "0.3", "--ignore-data", "--json", "--report", str(path)]
    assert run([*SMALL, *more]) == 0
    figures = json.loads(capsys.readouterr().out)
    text = words(path)
    middle = figures["cycles"]["forward"]
    seed = next(r["seed"] for r in figures["seeds"] if r["cycles"]["forward"] == middle)
    assert f"Cycles {middle:,.0f} forward" in text
    assert f"Seed {seed} " in text
    assert "error" not in text
    timeline = data(path)["timelines"]["p0"]
    rows = [timeline["kinds"][kind] for kind in timeline["order"]]
    assert sum(sum(row[1:]) for row in rows) == middle


@pytest.mark.parametrize("more", [[], ["--plan-only"]], ids=["figures", "plan only"])
def test_dense(tmp_path, capsys, more):
    path = tmp_path / "page.html"
    passes = ["--passes", "forward,grad_weight"]
    more = [*more, "--method", "dense", *passes, "--json", "--report", str(path)]
    sizes = COMMAND.partition(" --density")[0].split()
    assert run([*sizes, "--tiles", "16", *more]) == 0
    figures = json.loads(capsys.readouterr().out)
    text = words(path)
    for cycles in figures.get("cycles", figures.get("estimated_cycles")).values():
        assert f"{cycles:,.0f}" in text
    assert "Tiles along the out-channels" in text
    assert ("Forward: timeline" in text) == ("cycles" in figures)
    assert "Buckets" not in text


@pytest.mark.parametrize("more", [[], ["--plan-only"], ["--seeds", "3"]], ids=" ".join)
def test_static(tmp_path, capsys, more):
    path = tmp_path / "page.html"
    more = [*more, "--method", "static", "--passes", "forward,grad_input", "--json"]
    assert run([*SMALL, *more, "--report", str(path)]) == 0
    figures = json.loads(capsys.readouterr().out)
    text = words(path)
    for name, cycles in figures.get("cycles", figures.get("estimated_cycles")).items():
        assert f"{cycles:,.0f} {name.replace('_', ' ')}" in text
    ran = "cycles" in figures
    predicted = "Predicted by the execution model" if ran else "Predicted cycles"
    title = "Static product 128 × 96 by 32 on bow"
    for expected in (title, "Column bands", "Blocks per tile", predicted, "Runners-up"):
        assert expected in text
    assert ("Grad input: timeline" in text) == ran


def test_plan_only(tmp_path, capsys):
    path = tmp_path / "page.html"
    assert run([*SMALL, "--plan-only", "--json", "--report", str(path)]) == 0
    figures = json.loads(capsys.readouterr().out)
    text = words(path)
    for name, cycles in figures["estimated_cycles"].items():
        assert f"{cycles:,} {name.replace('_', ' ')}" in text
    assert "timeline" not in text


def test_unwritable_page_raises_before_the_run(tmp_path, capsys):
    for wrong in (tmp_path, tmp_path / "missing" / "page.html"):
        assert run([*SMALL, "--report", str(wrong)]) == 2
        error = capsys.readouterr()
        assert error.err.startswith("dynsparse: --report: expected a file in a folder that can")
        assert error.err.count("\n") == 1
        assert error.out == ""
