"""The examples run and match the figures of Poplar's tutorials for the same programs."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from popsparse.machine import Engine, Target

EXAMPLES = Path(__file__).parents[3] / "examples"


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
    # The best of its cuts, as the tutorial's planner finds.
    cuts = re.findall(r"^ +(\d+): +([\d,]+) +([\d,]+)$", text, re.M)
    assert len(cuts) == 6
    assert min(cuts, key=lambda row: int(row[2].replace(",", "")))[0] == "7"


def test_matrix_product_and_out_of_memory(capsys):
    space = runpy.run_path(str(EXAMPLES / "tile_machine_matmul.py"))
    graph, program = space["build"](90, 60, 30, Target.mk2(tiles=64))
    engine = Engine(graph, program)
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(90, 60)), rng.normal(size=(60, 30))
    engine.write("a", a)
    engine.write("b", b)
    engine.run()
    np.testing.assert_allclose(engine.read("c"), a @ b, atol=1e-4)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_matrix_products_of_the_tutorials(capsys):
    runpy.run_path(str(EXAMPLES / "tile_machine_matmul.py"), run_name="__main__")
    text = capsys.readouterr().out
    fits, does_not = text.split("TFLOP/s")
    assert "Target: mk2, 1,472 tiles" in fits
    assert "matmul/dense product" in fits
    assert re.search(r"fullest tile \d+ holds \d{3},\d{3} bytes \(1\d\d\.\d%\)", does_not)
    assert re.search(r"tile \d+ needs [\d,]+ bytes at step .* and has 638,976", does_not)


def test_logistic_regression_on_tiles():
    space = runpy.run_path(str(EXAMPLES / "tile_machine_logistic.py"))
    found = space["images_of"](None)
    accuracy, profile, engine = space["train"](found, epochs=1)
    assert accuracy > 0.85
    # The same steps in NumPy.
    images, labels = found.train.images.numpy(), found.train.labels.numpy()
    steps = len(images) // 64
    weight, bias = np.zeros((784, 10)), np.zeros(10)
    order = np.random.default_rng(0).permutation(len(images))[: steps * 64]
    for batch in order.reshape(-1, 64):
        powers = np.exp(images[batch] @ weight + bias)
        error = powers / powers.sum(1, keepdims=True) - np.eye(10)[labels[batch]]
        weight -= 0.5 / 64 * images[batch].T @ error
        bias -= 0.5 / 64 * error.sum(0)
    np.testing.assert_allclose(engine.read("weight"), weight, atol=1e-5)
    np.testing.assert_allclose(engine.read("bias"), bias, atol=1e-5)
    assert profile.step("softmax/exp").runs == steps
    assert profile.from_host_bytes == steps * 64 * (784 + 10) * 4


def test_two_processors(capsys):
    runpy.run_path(str(EXAMPLES / "tile_machine_two_processors.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert float(text.rsplit("element: ", 1)[1]) < 1e-3
    # The input there, half of the output back: float16.
    crossing = 2 * (64 * 256 + 64 * 256)
    assert f"Links between processors: {crossing:,} bytes" in text


def test_code_of_the_page_runs(capsys):
    page = (EXAMPLES.parent / "docs" / "popsparse-machine.md").read_text()
    space: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "popsparse-machine.md", "exec"), space)
    assert "pass on" in capsys.readouterr().out
