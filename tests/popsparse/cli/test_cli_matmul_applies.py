"""Options of `dynsparse matmul` that do not apply raise instead of being ignored."""

import dataclasses
import json

import pytest

pytest.importorskip("typer")

from dynsparse.cli.app import run
from popsparse.cli.matmul import methods
from popsparse.cli.matmul.request import Request

SIZES = "matmul --rows 64 --cols 64 --batch 8 --tiles 16"
OPTIONS = {
    "density": "--density 0.1",
    "block_size": "--block-size 1",
    "dtype": "--dtype float16",
    "method": "",
    "passes": "--passes forward",
    "target": "--target bow",
    "tiles": "",
    "partials_type": "",  # below
    "available_memory_proportion": "--available-memory-proportion 0.6",
    "oversize": "--oversize 0.3",
    "options": "--options {}",
    "plan_constraints": "--plan-constraints {}",
    "seed": "--seed 0",
    "seeds": "--seeds 1",
    "weighted_area_begin": "--weighted-area-begin 0 0 --weighted-area-end 8 8",
    "weighted_area_end": "--weighted-area-begin 0 0 --weighted-area-end 8 8",
    "weighted_area_weighting": "--weighted-area-begin 0 0 --weighted-area-end 8 8 "
    "--weighted-area-weighting 2",
    "check": "--check normal",
    "ignore_data": "--ignore-data",
    "ignore_memory": "--ignore-memory",
    "plan_only": "--plan-only",
    "report_plan": "--report-plan",
    "json": "--json",
    "report": "--report page.html",
    "profile": "--profile page.json",
    "update": "--update sum",
}
"""Each as it is by default where that can be said: what is given counts, whatever its value."""

ANYWHERE = {
    "dtype", "method", "passes", "target", "tiles", "partials_type", "available_memory_proportion",
    "plan_only", "json", "report",
}  # fmt: skip
AREA = {"weighted_area_begin", "weighted_area_end", "weighted_area_weighting"}
SPARSE = {"density", "block_size", "options", "report_plan"}
# By hand: what a method has a use for, when it only plans, and when it runs.
PLANS = {
    "dynamic": ANYWHERE | SPARSE | {"oversize", "plan_constraints"},
    "static": ANYWHERE | SPARSE | AREA | {"seed"},
    "dense": ANYWHERE,
}
RUNS = {
    "dynamic": PLANS["dynamic"]
    | AREA
    | {"seed", "seeds", "check", "ignore_data", "ignore_memory", "update", "profile"},
    "static": PLANS["static"] | {"seeds", "check", "ignore_data", "profile"},
    "dense": PLANS["dense"] | {"seed", "check", "ignore_data", "profile"},
}


def test_cases_cover_every_option():
    known = {field.name for field in dataclasses.fields(Request)} - {"rows", "cols", "batch"}
    assert set(OPTIONS) == known


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dynamic", "static", "dense"])
@pytest.mark.parametrize("how", ["plans", "runs"])
def test_every_option_with_every_method(method, how, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(methods.METHODS, method, lambda request: None)
    serves = {"plans": PLANS, "runs": RUNS}[how][method]
    for name, line in OPTIONS.items():
        more = "--plan-only" if how == "plans" and name != "plan_only" else ""
        status = run([*SIZES.split(), "--method", method, *more.split(), *line.split()])
        told = capsys.readouterr().err
        assert status == (0 if name in serves else 2), (name, told)
        if status:
            assert told.count("\n") == 1
            assert "leave" in told
            # An area is refused by the first of its flags.
            assert any(flag in told for flag in line.split() if flag.startswith("--")), told


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--partials-type float16", "products of elements add in float32, got float16"),
        ('--options {"partials_type":"float16"}', "elements add in float32, got float16"),
        ("--block-size 4 --dtype float32 --partials-type float16", "of float32 add in float32"),
        ('--block-size 4 --options {"shared_buckets":false}', "shared_buckets is for elements"),
    ],
)
def test_options_without_effect_raise(capsys, more, words):
    assert run([*SIZES.split(), "--plan-only", *more.split()]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "leave it out" in told


def test_valid_partials_types(capsys):
    for more in ("--partials-type float32", "--block-size 4 --partials-type float16"):
        assert run([*SIZES.split(), "--plan-only", "--json", *more.split()]) == 0
        assert json.loads(capsys.readouterr().out)["plan"]
