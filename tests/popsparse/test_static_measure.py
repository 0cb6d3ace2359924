"""Measured figures of static passes, compared with the two estimates."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from dynsparse.pattern import SparsePattern
from popsparse import static
from popsparse.machine import Target
from popsparse.measure import (
    plan_figures,
    run_figures,
    run_plans,
    static_plans,
)


def pattern(block=8):
    return SparsePattern.random(
        (96, 128), density=0.3, block_size=block, generator=torch.Generator().manual_seed(0)
    )


@pytest.mark.parametrize(("dtype", "error"), [("float16", 5e-3), ("float32", 1e-5)])
def test_figures_of_both_passes(dtype, error):
    plans = static_plans(pattern(), 20, dtype, Target.bow(tiles=16), ("forward", "grad_input"))
    assert plans["forward"].pattern.shape == (96, 128)
    assert plans["grad_input"].pattern.shape == (128, 96)
    runs = run_plans(plans)
    figures = run_figures(plans, runs)
    assert figures["cycles"] == {name: run.profile.cycles for name, run in runs.items()}
    for name, plan in plans.items():
        assert runs[name].profile.step("multiply").compute > 0
        assert figures["cycles"][name] == pytest.approx(static.predict(plan).cycles, rel=0.09)
    products = 2 * pattern().nnz * 64 * 20
    seconds = figures["cycles"]["grad_input"] / 1.85e9
    assert figures["tflops"]["grad_input"] == pytest.approx(products / seconds / 1e12)
    assert 0 < figures["max_relative_error"] < error
    quick = run_figures(plans, run_plans(plans, ignore_data=True))
    assert quick == figures | {"max_relative_error": None}
    assert plan_figures(plans["forward"])["method"] == "static"


def test_no_grad_weight():
    with pytest.raises(ValueError, match="forward and grad_input, got 'grad_weight'"):
        static_plans(pattern(), 20, "float16", Target(tiles=4), ["grad_weight"])


def test_plans_larger_than_memory():
    target = Target(tiles=2, bytes_per_tile=20_000)
    options = {"available_memory_proportion": 10}
    plans = static_plans(pattern(), 64, "float16", target, options=options)
    with pytest.raises(ValueError, match=r"needs .* bytes a tile .*, the target has 20000"):
        run_plans(plans)


def _compare(shape, tiles, densities, batches):
    """Return ratios over a grid: cycles to predicted and to planned ones, memory to the model's."""
    found = []
    for density, block, n, dtype in itertools.product(
        densities, (1, 4, 8, 16), batches, ("float16", "float32")
    ):
        generator = torch.Generator().manual_seed(0)
        drawn = SparsePattern.random(shape, density, block_size=block, generator=generator)
        plan = static.plan(drawn, n, dtype, Target.bow(tiles=tiles))
        profile = run_plans({"forward": plan}, ignore_data=True)["forward"].profile
        needed = profile.memory.max_tile_bytes / static.tile_memory(plan).needed
        predicted = profile.cycles / static.predict(plan).cycles
        found.append((predicted, profile.cycles / plan.cycles, needed))
    return np.array(found).T


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "tiles", "densities", "batches"),
    [
        ((256, 256), 16, (0.02, 0.1, 0.5), (7, 64, 200)),
        ((512, 256), 64, (0.02, 0.1, 0.5), (7, 64, 200)),
        ((1024, 1024), 1472, (0.1, 0.5), (7, 64)),
    ],
)
def test_estimates_and_run_agree(shape, tiles, densities, batches):
    """The execution model ignores data that is already on its tile, which matters on few tiles; the
    planner knows only the density."""
    predicted, planned, memory = _compare(shape, tiles, densities, batches)
    few = tiles < 1000
    assert (predicted > (0.95 if few else 0.98)).all()
    assert (predicted < (1.07 if few else 1.04)).all()
    assert 1 <= np.median(predicted) < 1.02
    assert (planned > 0.55).all()
    assert (planned < 3.1).all()
    if not few:  # Small tiles' data are mostly what rounding makes of them.
        assert (memory > 0.9).all()
        assert (memory < 1.12).all()


def test_code_of_the_guide_runs(capsys):
    guide = Path(__file__).parents[2] / "docs" / "popsparse-static.md"
    names = {}
    for code in re.findall(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL):
        exec(code, names)
    assert "Static plan: sparse" in capsys.readouterr().out
    predicted = static.predict(names["sparse"].plan).cycles
    assert names["profile"].cycles == pytest.approx(predicted, rel=0.1)
