"""Tables, page and plot of the benchmark report, from made-up figures."""

import copy
import re
from pathlib import Path

import pytest
from bench_tables import MACHINE_VIEWS, VIEWS, fill_page

from dynsparse.bench.results import load_results
from dynsparse.bench.spec import find_spec, read_spec
from dynsparse.report.bench import describe_machine, draw_speedups, full_report, table


def spread(median):
    return {"median": median, "low": 0.9 * median, "high": 1.1 * median}


def cell(n, density, block=1, batch=128, disturbed=False, **ratios):
    return {
        "layer": str(n), "features": [n, n], "batch": batch, "density": density, "block": block,
        "threads": 2, "dtype": "float32", "kernel": "sparse", "rounds": 5, "foreign": 0.0,
        "disturbed": disturbed, "times": {}, "ratios": {k: spread(v) for k, v in ratios.items()},
    }  # fmt: skip


def run(steps, seconds):
    return {"steps": steps, "seconds": seconds, "updates": 2, "update_seconds": 0.5,
            "curve": [[20, 5.0, 0.5], [40, 10.0, 0.95]]}  # fmt: skip


@pytest.fixture
def results():
    update = cell(1024, 0.1, step_with_update=4.0, drop=0.1, growth=1.5, dense_topk=9.0,
                  rewiring=0.5, encoding=0.3)  # fmt: skip
    tiny = cell(16, 0.1, batch=1, dense=0.6)
    tiny["times"] = {"dynsparse": spread(14e-6), "dense": spread(9e-6)}
    training = cell(0, 0.05)
    training |= {"layer": "3072-64-10", "features": [3072, 64, 10]}
    training["training"] = [
        {"seed": 0, "density": 0.05, "accuracy": 0.9,
         "contenders": {"dynsparse": run(40, 10.0), "masked": run(40, 55.0)}},
        {"seed": 1, "density": 0.05, "accuracy": 0.9,
         "contenders": {"dynsparse": run(40, 10.0), "masked": run(None, None)}},
    ]  # fmt: skip
    steps = [
        cell(n, d, b, masked=0.4 * b**0.2 / d, dense=0.3 * b**0.2 / d)
        for n in (1024, 4096) for b in (1, 4, 16) for d in (0.1, 0.2, 0.5)
    ]  # fmt: skip
    steps[0]["disturbed"] = True
    steps[0]["ratios"]["mkl"] = spread(2.5)
    found = {
        "machine": {
            "processor": "A CPU", "cores": 2, "kernels": "native", "isa": "v4",
            "system": "Linux x86_64", "python": "3.11", "mkl": True, "versions": {"torch": "2.13"},
        },
        "benchmarks": {
            "steps": {"measure": "step", "cells": steps, "refused": [{"cell": "x", "why": "y"}]},
            "updates": {"measure": "update", "cells": [update], "refused": []},
            "calls": {"measure": "forward", "cells": [tiny], "refused": []},
            "training": {"figures": {"cells": [training], "refused": []}},
            "command": {"output": "a line\n"},
        },
    }  # fmt: skip
    for benchmark in found["benchmarks"].values():
        benchmark |= {"about": "about it", "measured": "2026-01-02"}
    return found


def rows(text):
    return [[part.strip() for part in line.strip("|").split("|")] for line in text.splitlines()
            if line.startswith("|")]  # fmt: skip


def test_a_table_is_markdown():
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_machine_is_named(results):
    assert describe_machine(results) == (
        "A CPU, 2 cores, Linux x86_64; kernels for v4; torch 2.13, Python 3.11, MKL."
    )
    results["machine"] |= {"kernels": "fallback", "mkl": False}
    assert "plain torch; torch 2.13, Python 3.11, no MKL" in describe_machine(results)
    assert VIEWS["machine"](results, []).startswith("Measured 2026-01-02 on: A CPU")


def test_unusual_settings_of_a_cell_are_shown(results):
    """Usual settings are covered by the tables of the pages, compared below."""
    text = VIEWS["speed-up"](results, ["steps"])
    assert "\\* others took part of the machine in every attempt." in text
    assert "Not measured: x: y." in text
    for cell in results["benchmarks"]["steps"]["cells"]:
        cell["ratios"]["dense"] = spread(0.6 if cell["block"] == 1 else 2.5)
    assert rows(VIEWS["break-even"](results, ["steps"]))[2] == [
        "1024", "128", "slower everywhere; 0.60 at 0.5", "", "",
    ]  # fmt: skip


def test_updates_are_counted_in_steps(results):
    (row,) = rows(VIEWS["updates"](results, ["updates"]))[2:]
    assert row[3:8] == ["0.10", "1.50", "9.00", "0.50", "0.30"]
    assert row[8:] == ["3.0 (2.6 to 3.4)", "2.9 % (2.5 to 3.3)"]


def test_overhead_is_a_difference_in_microseconds(results):
    (row,) = rows(VIEWS["overhead"](results, ["calls"]))[2:]
    assert row[3:] == ["14.0", "9.0", "5.0"]


def test_training_table_has_a_row_per_seed(results):
    first, second = rows(VIEWS["training"](results, ["training"]))[2:]
    assert first == ["3072-64-10", "95.0 %", "1", "0", "40", "40", "5.5", "2 (5.0 % of the time)"]
    assert second[5:7] == ["not within 40", ""]


def test_report_has_a_section_per_benchmark(results):
    text = full_report(results)
    for name in results["benchmarks"]:
        assert f"## {name}\n\nabout it\n\n" in text
    assert "```\na line\n```" in text


def test_page_is_filled_in_between_its_comments(results, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\n<!-- bench: law -->\nold\n<!-- /bench -->\n\nkept\n\n"
        "<!-- bench: speed-up later -->\nalso kept\n<!-- /bench -->\n"
    )
    fill_page(page, results)
    text = page.read_text()
    assert VIEWS["law"](results, []) in text
    assert "old" not in text
    assert "\nkept\n" in text
    assert "also kept" in text
    fill_page(page, results)
    assert page.read_text() == text


@pytest.fixture
def two_machines(results):
    """Return the results, and those of a machine with half the speedup over masked dense alone."""
    other = copy.deepcopy(results)
    other["machine"]["processor"] = "Another CPU"
    for one in other["benchmarks"]["steps"]["cells"]:
        masked = one["ratios"]["masked"]
        one["ratios"] = {"masked": {key: value / 2 for key, value in masked.items()}}
    return results, other


def test_page_may_show_other_machines(two_machines, tmp_path):
    results, other = two_machines
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- bench: speed-up steps @far -->\nold\n<!-- /bench -->\n"
        "<!-- bench: machines steps -->\nold too\n<!-- /bench -->\n"
        "<!-- bench: law -->\n<!-- /bench -->\n"
    )
    fill_page(page, results)  # one machine: what is about others stays
    assert "old\n" in page.read_text()
    assert "old too\n" in page.read_text()
    fill_page(page, results, {"far": other})
    text = page.read_text()
    assert VIEWS["speed-up"](other, ["steps"]) in text
    assert MACHINE_VIEWS["machines"]([results, other], ["steps"]) in text
    assert "old" not in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# A", "got none"),
        ("<!-- bench: speed-up later -->\n<!-- /bench -->", "of benchmarks that were measured"),
        ("<!-- bench: graph a -->\n<!-- /bench -->", "got 'graph'"),
    ],
)
def test_page_without_matching_comments_raises(results, tmp_path, text, message):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="expected") as caught:
        fill_page(page, results)
    assert message in str(caught.value)
    assert page.read_text() == text


def test_plot_is_drawn(results, tmp_path):
    pytest.importorskip("matplotlib")
    assert draw_speedups(results, tmp_path / "a.png").stat().st_size > 10_000
    later = copy.deepcopy(results["benchmarks"]["steps"])
    for one in later["cells"]:
        del one["ratios"]["masked"]
    results["benchmarks"]["later"] = later  # of other contenders
    draw_speedups(results, tmp_path / "c.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "c.png").read_bytes()
    del results["benchmarks"]["steps"], results["benchmarks"]["later"]
    with pytest.raises(ValueError, match="expected training steps"):
        draw_speedups(results, tmp_path / "b.png")


ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIGURES = [
    ROOT / "benchmarks" / "figures" / f"{name}.json"
    for name in ("xeon", "epyc", "epyc-zen3", "epyc-zen5")
]


@pytest.mark.parametrize("name", ["README.md", "docs/when-is-it-faster.md", "docs/results.md"])
def test_tables_of_a_page_match_the_figures(name, tmp_path):
    results, *others = (load_results(file) for file in FIGURES)
    page = tmp_path / "page.md"
    page.write_text((ROOT / name).read_text())
    fill_page(page, results, dict(zip((f.stem for f in FIGURES[1:]), others, strict=True)))
    assert page.read_text() == (ROOT / name).read_text()


def test_stored_figures_belong_to_defined_cells():
    pytest.importorskip("yaml")
    spec = read_spec(find_spec()).benchmarks
    assert {file.name for file in FIGURES} == {f.name for f in FIGURES[0].parent.iterdir()}
    for file in FIGURES:
        results = load_results(file)
        assert len(results["machine"]["processor"]) > 5
        for name, benchmark in results["benchmarks"].items():
            if name == "memory":
                assert 1e8 < benchmark["figures"]["peak"] < 1e9
            if "figures" in benchmark:  # of a command, which chooses its own cells
                continue
            asked = {(c.layer, c.batch, c.density, c.block, c.threads, c.dtype)
                     for c in spec[name].cells}  # fmt: skip
            cells = [tuple(c[k] for k in ("layer", "batch", "density", "block", "threads", "dtype"))
                     for c in benchmark["cells"]]  # fmt: skip
            assert set(cells) <= asked
            assert len(set(cells)) == len(cells)
    elements = [load_results(file)["benchmarks"]["elements"]["cells"] for file in FIGURES[:2]]
    assert all(len(cells) == len(spec["elements"].cells) for cells in elements)


def test_benchmark_page_contains_every_table():
    pytest.importorskip("yaml")
    covered = {b.name for b in read_spec(find_spec()).select(["page"])}
    asked = [
        found.split() for page in PAGES
        for found in re.findall(r"^<!-- bench: (.*) -->$", page.read_text(), flags=re.MULTILINE)
    ]  # fmt: skip
    assert {view for view, *_ in asked} <= VIEWS.keys() | MACHINE_VIEWS.keys()
    names = {name for _, *names in asked for name in names}
    assert {name for name in names if not name.startswith("@")} == covered
    assert {name[1:] for name in names - covered} == {file.stem for file in FIGURES[1:]}
