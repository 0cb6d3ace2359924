"""The YAML file of benchmarks, and one-line errors for bad entries."""

import pytest

from dynsparse.bench.cells import Cell
from dynsparse.bench.spec import MEASURES, find_spec, read_spec

yaml = pytest.importorskip("yaml")

GRID = "grid: {layer: 8, batch: 2, density: 0.5}"


def read(tmp_path, text):
    file = tmp_path / "b.yml"
    file.write_text(text)
    return read_spec(file)


def one(tmp_path, entries):
    return read(tmp_path, f"benchmarks:\n  a:\n    about: it\n    {entries}\n").benchmarks["a"]


def test_grid_is_the_product_of_its_lists(tmp_path):
    benchmark = one(
        tmp_path,
        "measure: step\n    grid: {layer: [8, 4x6], batch: 2, density: [0.5, 1], block: 2}",
    )
    assert set(benchmark.cells) == {
        Cell(features, 2, density, 2)
        for features in ((8, 8), (4, 6))
        for density in (0.5, 1.0)
    }  # fmt: skip
    assert benchmark.contenders == ("masked", "dense", "mkl")


def test_list_of_grids_is_joined_without_duplicates(tmp_path):
    grids = "[{layer: 8, batch: [1, 2], density: 0.5}, {layer: 8, batch: [2, 3], density: 0.5}]"
    benchmark = one(tmp_path, f"measure: forward\n    grid: {grids}")
    assert [cell.batch for cell in benchmark.cells] == [1, 2, 3]


def test_network_that_looks_like_a_date(tmp_path):
    grid = "grid: {layer: [1024-10-10, 78-32-10-5], batch: 2, density: 0.5}"
    benchmark = one(tmp_path, f"measure: network\n    {grid}")
    assert [cell.features for cell in benchmark.cells] == [(1024, 10, 10), (78, 32, 10, 5)]
    assert [cell.layer for cell in benchmark.cells] == ["1024-10-10", "78-32-10-5"]


def test_benchmarks_override_defaults(tmp_path):
    spec = read(
        tmp_path,
        f"defaults: {{seconds: 2, repeats: 0}}\nbenchmarks:\n"
        f"  a: {{about: x, measure: step, {GRID}}}\n"
        f"  b: {{about: x, measure: step, seconds: 0.5, {GRID}}}\n",
    )
    assert spec.benchmarks["a"].effort.seconds == 2
    assert spec.benchmarks["b"].effort.seconds == 0.5
    assert spec.benchmarks["b"].effort.repeats == 0


def test_groups_of_benchmarks_are_resolved_in_order_and_once(tmp_path):
    spec = read(
        tmp_path,
        f"benchmarks:\n  a: {{about: x, measure: step, {GRID}}}\n"
        "  b: {about: x, command: [python, -V]}\n  c: {about: x, runs: [b, a]}\n",
    )
    assert [b.name for b in spec.select(["c", "a"])] == ["b", "a"]
    assert [b.name for b in spec.select(["a", "b", "c"])] == ["a", "b"]
    with pytest.raises(ValueError, match=r"expected one of a, b, c .*, got 'd'"):
        spec.select(["d"])


def test_benchmarks_of_the_repository_are_valid():
    spec = read_spec(find_spec())
    assert {b.measure for b in spec.benchmarks.values()} == {*MEASURES, None}
    elements, blocks = (spec.benchmarks[f"grid-{name}"].cells for name in ("elements", "blocks"))
    grid = {*elements, *blocks}
    assert {cell.layer for cell in grid} == {"256", "784x300", "1024", "2048", "4096"}
    assert {cell.batch for cell in grid} == {1, 16, 32, 128, 512, 2048}
    assert {cell.density for cell in grid} == {0.01, 0.05, 0.1, 0.2, 0.3, 0.5}
    assert {cell.block for cell in grid} == {1, 4, 8, 16, 32, 64, 128}
    assert {cell.threads for cell in grid} == {1, 2}
    for script in (b.command for b in spec.benchmarks.values() if b.command):
        assert (find_spec().parent / script[1]).is_file()


STEP = "benchmarks: {a: {about: x, measure: step, "
CELL = "layer: 8, batch: 2, density: 0.5"
WRONG = [
    ("", "b.yml, the file: expected a mapping, got None"),
    ("a: [", "b.yml: expected a YAML file, got an error"),
    ("a: !!float abc", "b.yml: expected a YAML file, got an error"),
    ("a: !!python/object/apply:os.system [x]", "b.yml: expected a YAML file, got an error"),
    ("[" * 20_000, "b.yml: expected a YAML file, got an error"),
    ("benchmarks: {a: {about: x, measure: [step], grid: {}}}", "measure: expected one of"),
    (
        STEP
        + f"grid: {{layer: 8, density: 1, batch: [{'1,' * 101}], threads: [{'1,' * 101}]}}}}}}",
        "layer: expected at most 10,000 cells in all, in several benchmarks, got 10201",
    ),
    ("other: {}", "b.yml, the file, other: expected one of the keys defaults, benchmarks"),
    ("defaults: {}", "b.yml, the file, benchmarks: expected a mapping from names to benchmarks"),
    ("benchmarks: {1: {}}", "benchmarks: expected names that are text, got 1"),
    ("benchmarks: {a: {about: x}}", "one of measure, command and runs, got None"),
    ("benchmarks: {a: {measure: step}}", "benchmark 'a', about: expected a text, got None"),
    ("benchmarks: {a: {about: x, measure: run}}", "expected one of step, forward, network"),
    ("benchmarks: {a: {about: x, measure: step}}", "'a', grid: expected a mapping, got None"),
    ("benchmarks: {a: {about: x, runs: [b]}}", "runs: expected names of benchmarks of this file"),
    (STEP + "grid: {layer: 8, batch: 2}}}", "'a', grid, density: expected a value or a list"),
    (STEP + f"grid: {{{CELL}, blocks: 4}}}}}}", "'a', grid, blocks: expected one of the keys"),
    (STEP + "grid: {layer: 8, batch: 0, density: 1}}}", "batch: expected an integer of at least 1"),
    (STEP + "grid: {layer: 8, batch: 2, density: 0}}}", "expected a number above 0 and up to 1"),
    (
        STEP + "grid: {layer: 8, batch: 2, density: [0.1, 2]}}}",
        "density: expected a number in [0, 1], got 2",
    ),
    (STEP + "grid: {layer: 8-8, batch: 2, density: 1}}}", "such as 1024 or 784x300, got '8-8'"),
    (STEP + f"grid: {{{CELL}, dtype: int8}}}}}}", "dtype: expected one of float32, bfloat16"),
    (
        STEP + f"contenders: [jax], grid: {{{CELL}}}}}}}",
        "among masked, dense, mkl, masked_medium, dense_medium, one_thread",
    ),
    (
        STEP + f"seconds: -1, grid: {{{CELL}}}}}}}",
        "seconds: expected a number in [0, 3600], got -1",
    ),
    (STEP + f"accuracy: 0.5, grid: {{{CELL}}}}}}}", "accuracy: expected one of the keys"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_errors_name_file_key_expected_and_actual(tmp_path, text, message):
    with pytest.raises(ValueError, match="expected") as caught:
        read(tmp_path, text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("b.yml")


def test_installed_package_requires_the_option(monkeypatch, tmp_path):
    monkeypatch.setattr("dynsparse.bench.spec._PACKAGE", tmp_path / "a" / "b" / "c")
    with pytest.raises(FileNotFoundError, match="name one with --spec"):
        find_spec()
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    shipped = tmp_path / "a" / "b" / "c" / "benchmarks.yml"
    shipped.write_text("benchmarks: {}")
    assert find_spec() == shipped
