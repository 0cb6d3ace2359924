"""`dynsparse matmul --method static`."""

import json

import pytest

from dynsparse.cli.app import run

SMALL = (
    "matmul --method static --rows 128 --cols 96 --batch 32 --density 0.2 --block-size 8 --tiles 16"
)


def figures(capsys, *more):
    assert run([*SMALL.split(), "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_json_has_the_keys_of_the_contract(capsys, dtype):
    found = figures(capsys, "--dtype", dtype, "--passes", "forward,grad_input")
    assert found["plan"]["method"] == "static"
    assert {"x", "y", "z"} <= set(found["plan"])
    assert set(found["cycles"]) == set(found["tflops"]) == {"forward", "grad_input"}
    assert (found["spilled"], found["propagation_steps"]) == (0, 0)
    assert found["max_relative_error"] < 0.01
    seconds = found["cycles"]["forward"] / 1.85e9
    blocks = round(0.2 * 16 * 12)
    assert found["tflops"]["forward"] == pytest.approx(2 * 64 * blocks * 32 / seconds / 1e12)


def test_seeds_and_options(capsys):
    found = figures(capsys, "--seeds", "3", "--options", '{"n_split": 2}', "--ignore-data")
    assert [one["seed"] for one in found["seeds"]] == [0, 1, 2]
    spread = found["spread"]["forward"]
    assert spread["min"] <= found["cycles"]["forward"] <= spread["max"]
    assert found["plan"]["z"] == 2
    assert found["max_relative_error"] is None


def test_plans(capsys):
    found = figures(capsys, "--plan-only")
    assert set(found) == {"plan", "estimated_cycles", "report"}
    assert run([*SMALL.split(), "--plan-only"]) == 0
    assert "Static plan: sparse 128 x 96 times dense 96 x 32" in capsys.readouterr().out
    assert run([*SMALL.split(), "--report-plan"]) == 0
    shown = capsys.readouterr().out
    assert "Runners-up" in shown
    assert "TFLOP/s" in shown


@pytest.mark.parametrize("plan_only", [[], ["--plan-only"]])
def test_page(capsys, tmp_path, plan_only):
    page = tmp_path / "page.html"
    figures(capsys, "--report", str(page), "--passes", "forward,grad_input", *plan_only)
    text = page.read_text(encoding="utf-8")
    assert "Static product 128 × 96 by 32 on bow" in text
    assert "ather dense operand" in text
    assert "xchange partials" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--passes grad_weight", "forward and grad_input, got 'grad_weight'"),
        ("--oversize 0.5", "--oversize: applies to --method dynamic, got --method static"),
        ("--dtype float16 --partials-type float32", "in the type of the data, float16"),
        ("--block-size 32", "got 32"),
        ("--rows 100", "multiple of --block-size 8, got 100"),
        ('--options {"bands":1}', "unknown option 'bands'"),
        ('--options {"n_split":"a"}', "n_split must be an integer"),
    ],
)
def test_wrong_calls(capsys, more, message):
    assert run([*SMALL.split(), *more.split()]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
