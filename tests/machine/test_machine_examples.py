"""The examples run, and meet the figures of Poplar's tutorials on the same programs."""

import re
import runpy
from pathlib import Path

import pytest

from dynsparse.machine import Engine, Target

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_first_steps(capsys):
    space = runpy.run_path(str(EXAMPLES / "tile_machine_first_steps.py"))
    engine = space["engine"]
    assert engine.read("v1").tolist() == [1, 1.5, 2, 2.5]
    assert engine.read("matrix").tolist() == [[0] * 4, [0, 1, 1.5, 2], [0] * 4, [0] * 4]
    assert engine.read("suffix sums").tolist() == [7, 6, 4.5, 2.5]
    assert space["profile"].step("sums").compute == 6 * 20
    text = capsys.readouterr().out
    assert "echo [0 1 2 3 4 5 6 7 8 9]\necho [10 11 12 13 14 15 16 17 18 19]\n" in text
    assert "Target: mk2, 4 tiles" in text


def test_matrix_vector_product(capsys):
    path = str(EXAMPLES / "tile_machine_matvec.py")
    runpy.run_path(path, run_name="__main__")
    text = capsys.readouterr().out
    error = float(text.split("largest error ")[1].split()[0])
    assert error < 1e-4
    space = runpy.run_path(path)
    graph, program = space["build"](Target.mk2(sync_cycles=0, exchange_bus_tiles=1))
    profile = Engine(graph, program).run()
    # The tutorial's four terms: compute and exchange of the product, then of the reduction.
    assert profile.step("products").compute == 3696
    assert profile.step("spread").exchange == 143
    assert profile.step("gather").exchange == 49
    assert profile.step("sums").compute == 108
    assert profile.cycles == pytest.approx(3996, rel=0.002)


def test_the_page_on_the_machine_runs(capsys):
    page = (EXAMPLES.parent / "docs" / "popsparse-machine.md").read_text()
    space: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "popsparse-machine.md", "exec"), space)
    assert "pass on" in capsys.readouterr().out
