"""The page of the machine report: contents, omitted sections, bad input."""

from __future__ import annotations

import copy
import json
import re

import numpy as np
import pytest
import torch
from machine_pages import Page, small_product, small_run, whole_page

from dynsparse import SparsePattern
from popsparse import dense
from popsparse.encoding.partitioner import Partitioner
from popsparse.machine import (
    FLOAT,
    Copy,
    Engine,
    Graph,
    Sequence,
    Target,
    concat,
)
from popsparse.planning.params import FullyConnectedParams, SparsityParams
from popsparse.planning.search import make_plan
from popsparse.plans import plan_report, predict
from popsparse.report import encoding_data, report_html, write_report
from popsparse.report.passes import render_tile_map


def test_page_is_well_formed_and_self_contained(tmp_path):
    given = whole_page()
    path = write_report(tmp_path / "page.html", **given)
    assert path == tmp_path / "page.html"
    text = path.read_text("utf-8")
    page = Page(text)
    assert len(set(page.ids)) == len(page.ids)
    assert page.sections <= set(page.ids)
    assert all(a.startswith("#") or a == "data:," for a in page.addresses)
    assert not re.search(r"https?:|//cdn|@import|url\(", text)
    assert len(text) < 200_000
    assert page.sections == {
        "summary", "findings", "plan", "predicted", "buckets", "propagation",
        "p0-timeline", "p0-operations", "p0-tree", "p0-memory-steps", "p0-tiles",
        "p1-timeline", "p1-operations", "p1-tree", "p1-memory-steps", "p1-tiles",
    }  # fmt: skip
    for identity in (*page.data["tiles"], *page.data["maps"]):
        assert identity in page.ids
    assert set(page.data["timelines"]) == {"p0", "p1"}


def test_page_contains_the_numbers_of_the_profile():
    profile = small_run(tiles=4, turns=7)
    page = Page(report_html(title="t", summary={}, profile=profile))
    fill, rotate = profile.step("fill"), profile.step("rotate")
    for value in (profile.cycles, fill.cycles, rotate.exchange, rotate.sync):
        assert f" {value:,.0f} " in f" {page.words} "
    assert f"{profile.memory.max_tile_bytes:,} of {profile.memory.limit:,} B" in page.words
    assert "come from a model of the machine, not from hardware" in page.words
    tiles = page.data["tiles"]
    assert tiles["p0-cycles"]["cycles computing"] == profile.tile_cycles.tolist()
    assert tiles["p0-received"]["bytes received"] == profile.received_bytes.tolist()
    by_category = [np.array(v) for v in tiles["p0-memory"].values()]
    np.testing.assert_array_equal(np.sum(by_category, axis=0), profile.memory.per_tile)
    # The rows the script draws add up to the run, in order.
    source = page.data["timelines"]["p0"]
    rows = [source["kinds"][kind] for kind in source["order"]]
    assert [row[0] for row in rows] == [row.step for row in profile.timeline]
    assert sum(sum(row[1:]) for row in rows) == profile.cycles
    assert source["phases"] == [[0, 14, "body"], [14, 15, "back"]]


def test_plan_shows_terms_and_runners_up():
    plan, *_ = small_product()
    report = plan_report(plan)
    page = Page(report_html(title="t", summary={}, plan=report))
    chosen = report["plan"]
    assert f"{chosen['x']} × {chosen['y']} × {chosen['z']}" in page.words
    for cost in report["passes"].values():
        for term in cost["terms"]:
            assert term["name"].replace("_", " ") in page.words
            assert f"{term['cycles']:,}" in page.words
    for other in report["runners_up"]:
        assert f"{other['cycles']:,}" in page.words
    assert f"compared {report['search']['partitions']:,} cuts" in page.words
    assert page.sections == {"plan"}


def test_dense_plan():
    plan = dense.plan(64, 64, 16, "float32", Target.bow(tiles=16))
    page = Page(report_html(title="t", summary={}, plan=plan.to_dict()))
    assert f"Tiles along the streamed field {plan.field} Tiles along" in page.words
    assert f"Method {plan.method}" in page.words
    for cycles in plan.terms.values():
        assert f"{cycles:,}" in page.words


def test_predictions_without_a_run():
    plan, pattern, *_ = small_product()
    times = predict(plan, pattern)
    found = {name: time.to_dict() for name, time in times.items()}
    page = Page(report_html(title="t", summary={}, predicted=found))
    assert "Predicted cycles" in page.words
    for name, time in times.items():
        assert f"{name.replace('_', ' ')}: {time.cycles:,.0f} cycles" in page.words


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("force", [False, True], ids=["as it falls", "forced to spill"])
def test_memory_of_categories_adds_up(block, force):
    oversize = 2.0 if force else 0.5
    _, pattern, partitioner, encoded = small_product(
        block, force=force, meta_info_bucket_oversize_proportion=oversize
    )
    found = encoding_data(partitioner, encoded)
    info = encoded.info
    assert json.loads(json.dumps(found)) == found
    assert sum(found["demand"]) == sum(found["nz_used"]) == pattern.nnz * block**2
    assert sum(found["foreign"]) == info.propagated * block**2
    assert sum(values for *_, values in found["travels"]) == sum(found["foreign"])
    assert found["propagation_steps"] == found["partition"][2] * len(found["offsets"])
    # What travels lies at a distance that the propagation visits.
    assert {(x, y) for x, y, _ in found["travels"]} <= set(map(tuple, found["offsets"]))
    # By hand: which rectangle a block belongs to.
    x, y, _ = found["partition"]
    part_x, part_y, _ = partitioner.layout.part
    rectangle = (pattern.rows // part_x) * y + pattern.cols // part_y
    demand = np.bincount(rectangle.numpy(), minlength=x * y) * block**2
    assert found["demand"] == demand.tolist()
    page = Page(report_html(title="t", summary={}, encoding=found))
    assert f"{info.spilled:,} blocks left the bucket" in page.words
    if info.propagation_steps:
        assert f"{info.propagation_steps:,} steps" in page.words
        assert "map-guests" in page.ids
    else:
        assert "Here every bucket holds only" in page.words
        assert "map-guests" not in page.ids
    assert {"map-demand", "map-held", "map-words"} <= set(page.data["maps"])


def test_groups_and_separate_grad_input_buckets():
    params = FullyConnectedParams.create_with_nz_ratio(
        SparsityParams(1),
        nz_ratio=0.2,
        batch_size=8,
        num_groups=2,
        input_channels_per_group=16,
        output_channels_per_group=24,
    )
    options = {"do_grad_a_pass": True, "shared_buckets": False}
    plan = make_plan(Target.bow(tiles=12), "float32", params, options)
    partitioner = Partitioner(plan)
    patterns = [SparsePattern.random((24, 16), 0.2) for _ in range(2)]
    encoded = partitioner.encode(patterns, [torch.ones(p.values_shape) for p in patterns])
    found = encoding_data(partitioner, encoded)
    page = Page(report_html(title="t", summary={}, encoding=found))
    assert sum(found["demand"]) == sum(p.nnz for p in patterns)
    assert "in each of 2 groups" in page.words
    assert "meta-info of grad input, words" in page.words


def test_sections_without_data_are_omitted():
    page = Page(report_html(title="Only this", summary={}))
    assert page.sections == set()
    assert page.words.startswith("Only this Only this")
    profile = small_run()
    profile.timeline = []
    page = Page(report_html(title="t", summary={"seed": 7}, profile=profile))
    assert "p0-run" in page.sections
    assert "p0-timeline" not in page.sections


def test_overflowing_tiles_are_reported():
    def words(size):
        graph = Graph(Target(tiles=3, bytes_per_tile=size))
        a = graph.add_variable(FLOAT, [3, 4], "a", tiles=[0, 1, 1])
        b = graph.add_variable(FLOAT, [3, 4], "b", tiles=[1, 2, 2])
        engine = Engine(graph, Copy(a, b, name="move"), check_memory=False)
        return Page(report_html(title="t", summary={}, profile=engine.run())).words

    assert "Too much for 2 tiles." in words(40)
    assert "Too much" not in words(500)


def test_page_of_stored_profile_equals_that_of_the_run():
    profile = small_run()
    stored = json.loads(json.dumps(profile.to_dict()))
    fresh = Page(report_html(title="t", summary={}, profile=profile))
    again = Page(report_html(title="t", summary={}, profile=stored))
    assert again.sections == fresh.sections
    assert again.data == fresh.data
    assert again.words == fresh.words


@pytest.mark.slow
def test_pages_of_large_programs_stay_small():
    graph = Graph(Target(tiles=16))
    first = graph.add_variable(FLOAT, [1], "first", tiles=0)
    graph.add_handle("first", first)
    kept, steps = [first], []
    for i in range(2000):
        one = graph.add_variable(FLOAT, [1], f"variable {i}", tiles=i % 16)
        steps.append(Copy(kept[-1], one, name=f"step {i}"))
        kept.append(one)
    # All of them are demand until the end.
    steps.append(Copy(concat(kept[1:]), graph.add_variable(FLOAT, [2000], "all", tiles=1)))
    profile = Engine(graph, Sequence(*steps)).run()
    text = report_html(title="t", summary={}, profile=profile)
    page = Page(text)
    assert len(text) < 1_500_000
    assert len(page.data["contents"]["p0"]["variables"]) == 1500
    assert "The 502 smallest variables are left out here." in page.words
    assert "600 of 2,002 programs are shown." in page.words


@pytest.mark.parametrize(("tiles", "columns"), [(1, 1), (24, 6), (1472, 46), (1471, 54)])
def test_map_has_a_cell_per_tile(tiles, columns):
    used = np.linspace(1, 1000, tiles)
    drawn = render_tile_map(used, 500.0, "map")
    Page(drawn)
    assert f'data-columns="{columns}"' in drawn
    cells = re.findall(r"M[\d.]+ [\d.]+h", drawn)
    assert len(cells) == len(set(cells)) == tiles


def test_names_are_escaped():
    evil = "</script><img src=x onerror=alert(1)>\"'&"
    text = report_html(
        title=evil, summary={evil: evil, "cycles": {evil: 1}}, profile=small_run(name=evil)
    )
    page = Page(text)
    assert "<img" not in text
    assert evil.replace("/", "") in page.words.replace("/", "")
    assert any(evil in name for name in page.data["timelines"]["p0"]["steps"])


def test_summary_uses_units():
    summary = {
        "rows": 4096,
        "density": 0.0625,
        "dtype": "float16",
        "cycles": {"forward": 1234567, "grad_input": 7},
        "seconds": 2.5e-4,
        "tflops": 12.3456,
        "max_tile_bytes": 412345,
        "max_relative_error": 0.000312,
        "seed": 12345,
        "verified": True,
        "speed_up": 1.5,
        "nothing": None,
        "shape": [4096, 16],
    }
    words = Page(report_html(title="t", summary=summary)).words
    for expected in (
        "Rows (m) 4,096", "Density 6.25 % (1/16)", "1,234,567 forward 7 grad input",
        "Time 250 µs", "Throughput 12.35 TFLOP/s", "Fullest tile 412,345 B",
        "Largest relative error 0.000312", "Seed 12345", "Verified yes", "Speed up 1.5",
        "Nothing none", "Shape 4,096, 16",
    ):  # fmt: skip
        assert expected in words


def broken(profile, *path, value=None):
    """Return a copy of plain data with one entry changed or removed."""
    out = copy.deepcopy(profile)
    at = out
    for key in path[:-1]:
        at = at[key]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return out


PROFILES = {
    "number": (3, TypeError, "profile must be a Profile"),
    "nothing": ({"forward": {}}, ValueError, "profile of forward: the key 'target' is missing"),
    "no total": (("cycles", "total"), ValueError, "profile: the key 'total' is missing"),
    "text": (("steps", 1, "sync"), ValueError, "profile: could not convert", "much"),
    "row": (("timeline", 0), ValueError, "profile: .* missing 4 required", [1, 2]),
}


@pytest.mark.parametrize("name", PROFILES)
def test_invalid_profiles_raise(name):
    profile, kind, message, *value = PROFILES[name]
    if isinstance(profile, tuple):
        plain = small_run().to_dict()
        profile = broken(plain, *profile, value=value[0] if value else None)
    with pytest.raises(kind, match=message):
        report_html(title="t", summary={}, profile=profile)


def test_other_errors(tmp_path):
    for title in ("", "  ", None):
        with pytest.raises(ValueError, match="title must be a text that is not empty"):
            report_html(title=title, summary={})
    with pytest.raises(TypeError, match="summary must be a mapping, got NoneType"):
        report_html(title="t", summary=None)
    with pytest.raises(TypeError, match="plan must be a mapping, got str"):
        report_html(title="t", summary={}, plan="best")
    with pytest.raises(ValueError, match=r"plan: plan must be what plan_report or .* got x, y"):
        report_html(title="t", summary={}, plan={"x": 1, "y": 2})
    _, _, partitioner, encoded = small_product()
    encoding = encoding_data(partitioner, encoded)
    for key in ("partition", "nz_used", "words_capacity", "spilled"):
        with pytest.raises(ValueError, match=f"encoding: .*'{key}'"):
            report_html(title="t", summary={}, encoding=broken(encoding, key))
    with pytest.raises(ValueError, match="encoding: not enough values"):
        report_html(title="t", summary={}, encoding={**encoding, "partition": [2, 2]})
    with pytest.raises(ValueError, match=r"encoding: demand must be \d+ numbers"):
        report_html(title="t", summary={}, encoding={**encoding, "demand": [1.0]})
    with pytest.raises(FileNotFoundError):
        write_report(tmp_path / "missing" / "page.html", title="t", summary={})
    with pytest.raises(TypeError, match="title"):
        write_report(tmp_path / "page.html", summary={})
