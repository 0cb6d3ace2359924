"""The report of a plan, and the shortcut that returns one."""

import doctest
import json
import pathlib
import re

import pytest

from popsparse.machine.target import Target
from popsparse.planning import search as planning
from popsparse.planning.plan import PlanningCache
from popsparse.planning.search import parse_passes, plan
from popsparse.plans import plan_report, plan_text

SMALL = Target(name="small", tiles=24)
ALL = "forward,grad_input,grad_weight"


def test_terms_add_up():
    found = plan(512, 512, 64, 0.1, 4, "float16", SMALL, passes=ALL)
    report = plan_report(found)
    total = 0
    for cost in report["passes"].values():
        assert cost["cycles"] == sum(term["cycles"] for term in cost["terms"])
        assert cost["temporary_bytes"] == max(term["temporary_bytes"] for term in cost["terms"])
        total += cost["cycles"]
    assert report["cycles"] == total == found.cycles
    assert json.loads(json.dumps(report)) == report


def test_runners_up_are_slower_with_reasons():
    report = plan_report(plan(512, 512, 64, 0.1, 4, "float16", SMALL, passes=ALL))
    behind = [row["behind"] for row in report["runners_up"]]
    assert len(behind) == 10
    assert behind == sorted(behind)
    assert behind[0] >= 0
    assert all(row["why"] for row in report["runners_up"])
    assert report["search"]["partitions"] == len([0 for _ in _triples(24)])


def _triples(tiles):
    return (
        (x, y, z)
        for x in range(1, tiles + 1)
        for y in range(1, tiles // x + 1)
        for z in range(1, tiles // (x * y) + 1)
    )


def test_text_is_a_table():
    text = plan_text(plan(512, 512, 64, 0.1, 4, "float16", SMALL, passes=ALL))
    assert text.startswith("Plan on small\n  groups ")
    for name in ("forward", "grad_input", "grad_weight"):
        assert f"{name}: " in text
    assert "Runners-up:" in text
    assert max(len(line) for line in text.splitlines()) < 170


def test_text_says_when_nothing_fits():
    tiny = Target(tiles=2, bytes_per_tile=4096)
    text = plan_text(plan(256, 256, 64, 0.5, target=tiny))
    assert "does NOT fit" in text
    assert "without bound" in text


def test_one_partition_has_no_runner_up():
    text = plan_text(plan(8, 8, 4, 0.5, target=Target(tiles=1)))
    assert "Runners-up" not in text


def test_passes():
    assert parse_passes("grad_weight") == ("forward", "grad_weight")
    assert parse_passes(["grad_input", "forward"]) == ("forward", "grad_input")
    with pytest.raises(ValueError, match="passes must be among forward, grad_input"):
        parse_passes("backward")


def test_shortcut():
    found = plan(256, 128, 32, 0.1, 8, "float32", SMALL, options={"shared_buckets": False})
    assert found.sizes == (1, 256, 128, 32)
    assert list(found.costs) == ["forward"]
    cache = PlanningCache()
    assert plan(64, 64, 8, 0.1, cache=cache) is plan(64, 64, 8, 0.1, cache=cache)
    assert plan(64, 64, 8, 0.1).target.name == "mk2"


def test_documentation_runs():
    assert doctest.testmod(planning).failed == 0


def test_code_of_the_page_runs():
    page = pathlib.Path(__file__).parents[2] / "docs" / "popsparse-planner.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    names: dict = {}
    exec(compile(code, page.name, "exec"), names)
    assert names["times"]["forward"].cycles > 0
