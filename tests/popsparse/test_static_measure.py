"""The figures of static passes."""

import re
from pathlib import Path

import pytest
import torch

from dynsparse.machine import Target
from dynsparse.pattern import SparsePattern
from dynsparse.popsparse import static
from dynsparse.popsparse.static.measure import plan_figures, plan_passes, static_figures


def pattern(block=8):
    return SparsePattern.random(
        (96, 128), density=0.3, block_size=block, generator=torch.Generator().manual_seed(0)
    )


@pytest.mark.parametrize(("dtype", "error"), [("float16", 5e-3), ("float32", 1e-5)])
def test_figures_of_both_passes(dtype, error):
    plans = plan_passes(pattern(), 20, dtype, Target.bow(tiles=16), ("forward", "grad_input"))
    assert plans["forward"].pattern.shape == (96, 128)
    assert plans["grad_input"].pattern.shape == (128, 96)
    figures = static_figures(plans)
    assert figures["cycles"] == {name: static.predict(plan).cycles for name, plan in plans.items()}
    products = 2 * pattern().nnz * 64 * 20
    seconds = figures["cycles"]["grad_input"] / 1.85e9
    assert figures["tflops"]["grad_input"] == pytest.approx(products / seconds / 1e12)
    assert 0 < figures["max_relative_error"] < error
    assert static_figures(plans, ignore_data=True)["max_relative_error"] is None
    assert plan_figures(plans["forward"])["method"] == "static"


def test_no_grad_weight():
    with pytest.raises(ValueError, match="forward and grad_input, got 'grad_weight'"):
        plan_passes(pattern(), 20, "float16", Target(tiles=4), ["grad_weight"])


def test_plans_that_do_not_fit():
    target = Target(tiles=2, bytes_per_tile=20_000)
    options = {"available_memory_proportion": 10}
    plans = plan_passes(pattern(), 64, "float16", target, options=options)
    with pytest.raises(ValueError, match=r"needs .* bytes a tile, the target has 20000"):
        static_figures(plans)


def test_the_code_of_the_guide_runs(capsys):
    guide = Path(__file__).parents[2] / "docs" / "popsparse-static.md"
    names = {}
    for code in re.findall(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL):
        exec(code, names)
    assert "Static plan on bow" in capsys.readouterr().out
    predicted = static.predict(names["sparse"].plan).cycles
    assert names["profile"].cycles == pytest.approx(predicted, rel=0.1)
