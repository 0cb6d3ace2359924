"""`dynsparse matmul`: documented figures, and a one-line error for every wrong call."""

import json

import pytest

from dynsparse.cli.app import run

SMALL = "matmul --rows 128 --cols 96 --batch 32 --density 0.2 --block-size 8 --tiles 16"
DENSE = SMALL.replace(" --density 0.2 --block-size 8", "")
KEYS = {
    "plan",
    "cycles",
    "tflops",
    "max_tile_bytes",
    "propagation_steps",
    "spilled",
    "max_relative_error",
}


def figures(capsys, *more):
    sizes = DENSE if "dense" in more else SMALL
    assert run([*sizes.split(), "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_the_documented_keys(capsys):
    found = figures(capsys)
    assert set(found) == KEYS
    assert {"x", "y", "z", "method"} <= set(found["plan"])
    assert set(found["cycles"]) == set(found["tflops"]) == {"forward"}
    assert found["max_relative_error"] < 0.01
    seconds = found["cycles"]["forward"] / 1.85e9
    blocks = round(0.2 * 16 * 12)
    assert found["tflops"]["forward"] == pytest.approx(2 * 64 * blocks * 32 / seconds / 1e12)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_all_passes(capsys, dtype):
    names = "forward,grad_input,grad_weight"
    found = figures(capsys, "--passes", names, "--dtype", dtype)
    assert list(found["cycles"]) == names.split(",")
    assert found["max_relative_error"] < 0.01


def test_only_requested_passes_run(capsys):
    assert list(figures(capsys, "--passes", "grad_input")["cycles"]) == ["grad_input"]


@pytest.mark.parametrize("method", ["dynamic", "static", "dense"])
def test_normal_numbers_are_checked(capsys, method):
    more = ["--method", method, "--dtype", "float16"]
    usual, normal = figures(capsys, *more), figures(capsys, *more, "--check", "normal")
    assert normal["rounding"] == 2.0**-11
    assert 0 < normal["max_relative_error"] < 0.01
    assert normal["max_relative_error"] != usual["max_relative_error"]
    assert normal["cycles"] == usual["cycles"]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dense_runs_and_is_checked(capsys, dtype):
    names = "forward,grad_input,grad_weight"
    more = ["--method", "dense", "--passes", names, "--rows", "97", "--cols", "3000"]
    found = figures(capsys, *more, "--dtype", dtype)
    assert set(found) == KEYS
    assert found["plan"]["method"].startswith("dense")
    assert list(found["cycles"]) == names.split(",")
    seconds = found["cycles"]["forward"] / 1.85e9
    assert found["tflops"]["forward"] == pytest.approx(2 * 97 * 3000 * 32 / seconds / 1e12)
    assert 0 < found["max_relative_error"] < 0.01
    quick = figures(capsys, *more, "--dtype", dtype, "--ignore-data")
    assert quick == found | {"max_relative_error": None}
    estimated = figures(capsys, *more, "--dtype", dtype, "--plan-only")["estimated_cycles"]
    for name, cycles in found["cycles"].items():
        assert 0.8 < cycles / estimated[name] < 1.5


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_static(capsys, dtype):
    found = figures(
        capsys, "--method", "static", "--dtype", dtype, "--passes", "forward,grad_input"
    )
    assert set(found) == KEYS
    assert found["plan"]["method"] == "static"
    assert {"x", "y", "z"} <= set(found["plan"])
    assert set(found["cycles"]) == set(found["tflops"]) == {"forward", "grad_input"}
    assert (found["spilled"], found["propagation_steps"]) == (0, 0)
    assert found["max_relative_error"] < 0.01
    seconds = found["cycles"]["forward"] / 1.85e9
    blocks = round(0.2 * 16 * 12)
    assert found["tflops"]["forward"] == pytest.approx(2 * 64 * blocks * 32 / seconds / 1e12)


def test_seeds_and_options_of_static_products(capsys):
    more = ["--seeds", "3", "--options", '{"n_split": 2}', "--ignore-data"]
    found = figures(capsys, "--method", "static", *more)
    assert [one["seed"] for one in found["seeds"]] == [0, 1, 2]
    spread = found["spread"]["forward"]
    assert spread["min"] <= found["cycles"]["forward"] <= spread["max"]
    assert found["plan"]["z"] == 2
    assert found["max_relative_error"] is None


def test_seed_determines_the_static_plan(capsys):
    first, second = (
        figures(capsys, "--method", "static", "--plan-only", "--seed", seed)["report"]
        for seed in ("0", "1")
    )
    assert first != second


def test_plan_only(capsys):
    found = figures(capsys, "--plan-only")
    assert set(found) == {"plan", "estimated_cycles", "report"}
    assert set(found["estimated_cycles"]) == {"forward", "grad_input"}
    for method, title in (
        ("static", "Static plan: sparse 128 x 96 times dense 96 x 32"),
        ("dense", "Dense plan: 128 x 96 times 96 x 32"),
    ):
        found = figures(capsys, "--plan-only", "--method", method)
        assert set(found) == {"plan", "estimated_cycles", "report"}
        sizes = DENSE if method == "dense" else SMALL
        assert run([*sizes.split(), "--method", method, "--plan-only"]) == 0
        assert title in capsys.readouterr().out


def test_updates_of_the_pattern(capsys):
    found = {pooling: figures(capsys, "--update", pooling) for pooling in ("max", "none")}
    assert set(found["max"]) == KEYS | {"update"}
    update = found["max"]["update"]
    assert update["parts"].keys() >= {"dense gradient", "pool magnitudes", "scores to host"}
    assert sum(update["parts"].values()) == pytest.approx(update["cycles"])
    # Blocks of 8 x 8: 192 scores in float16 in place of the gradient.
    fewer = found["none"]["update"]["to_host_bytes"] - update["to_host_bytes"]
    assert fewer == 192 * (64 - 1) * 2
    assert run([*SMALL.split(), "--update", "sum"]) == 0
    text = capsys.readouterr().out
    assert "bytes to the host" in text
    assert "  pool magnitudes: " in text


def test_seeds_report_the_spread(capsys):
    found = figures(capsys, "--seeds", "3")
    cycles = [one["cycles"]["forward"] for one in found["seeds"]]
    assert found["cycles"]["forward"] == sorted(cycles)[1]
    assert found["spread"]["forward"]["min"] == min(cycles)
    assert found["spread"]["forward"]["max"] == max(cycles)


def test_cycles_are_equal_without_data(capsys):
    with_data, without = figures(capsys), figures(capsys, "--ignore-data")
    assert without["max_relative_error"] is None
    assert without["cycles"] == with_data["cycles"]


def test_weighted_area_spills(capsys):
    area = "--weighted-area-begin 0 0 --weighted-area-end 64 48 --weighted-area-weighting 4.5"
    fixed = ["--plan-constraints", '{"partition": {"x": 4, "y": 4, "z": 1}}']
    found = figures(capsys, *area.split(), *fixed, "--oversize", "0.4")
    assert found["spilled"] > 0


def test_constraints_and_options(capsys):
    fixed = ["--plan-constraints", '{"partition": {"x": 4, "y": 2, "z": 2}}']
    found = figures(capsys, *fixed, "--options", '{"force_bucket_spills": true}')
    assert [found["plan"][dim] for dim in "xyz"] == [4, 2, 2]
    assert found["spilled"] > 0


@pytest.mark.parametrize("method", ["dynamic", "static"])
def test_text(capsys, method):
    assert run([*SMALL.split(), "--method", method, "--report-plan", "--seeds", "2"]) == 0
    text = capsys.readouterr().out
    for words in ("Runners-up", "TFLOP/s", "fullest tile", "largest relative error"):
        assert words in text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--passes forwards", "passes must be among forward, grad_input, grad_weight"),
        ("--rows 100", "--rows must be a multiple of --block-size 8, got 100: use 104"),
        ('--options {"shared_bucket":true}', "did you mean 'shared_buckets'?"),
        ('--options {"shared_buckets":3}', "shared_buckets must be True or False"),
        ('--options {"n_split":1,"nSplit":2}', "option n_split is given twice"),
        ('--plan-constraints {"partition":{"w":3}}', "partition constraint 'w'"),
        ('--plan-constraints {"partition":{"x":99}}', "99 tiles a group"),
        ('--plan-constraints {"use_dense":true}', "use --method dense"),
        ("--weighted-area-begin 0 0", "--weighted-area-end: expected a row and a column"),
        ("--weighted-area-weighting 2", "needs --weighted-area-begin"),
        (
            "--weighted-area-begin 0 0 --weighted-area-end 999 9 --weighted-area-weighting 2",
            "expected an area within 128 x 96",
        ),
        ("--method static --passes grad_weight", "forward and grad_input, got 'grad_weight'"),
        ("--method static --partials-type float32", "in the type of the data, float16"),
        ("--method static --block-size 32", "got 32"),
        ("--method static --rows 100", "multiple of --block-size 8, got 100"),
        ('--method static --options {"bands":1}', "unknown option 'bands'"),
        ('--method static --options {"n_split":"a"}', "n_split must be an integer"),
        ("--report-plan", "--report-plan is text"),
        ("--check normal --ignore-data", "--check compares numbers"),
    ],
)
def test_wrong_calls_print_one_line(capsys, more, words):
    sizes = DENSE if "--method dense" in more else SMALL
    assert run([*sizes.split(), "--json", *more.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_overflowing_pattern_raises(capsys):
    area = "--weighted-area-begin 0 0 --weighted-area-end 64 48 --weighted-area-weighting 1"
    more = [*area.split(), "--oversize", "0", "--seeds", "8"]
    assert run([*SMALL.split(), *more]) == 2
    assert "raise meta_info_bucket_oversize_proportion" in capsys.readouterr().err


def test_out_of_memory_raises_and_can_be_ignored(capsys):
    large = "matmul --rows 2048 --cols 2048 --batch 1024 --density 0.02 --block-size 16 --tiles 4"
    large += " --ignore-data"
    assert run(large.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "use a smaller --batch" in err
    assert "check_memory" not in err
    assert run([*large.split(), "--ignore-memory", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_tile_bytes"] > 624 * 1024
