"""Plans in files and in the cache: equal to those that are made, and never another's."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import test_imports

from dynsparse.files.cache import open_cache
from dynsparse.machine import Target
from dynsparse.popsparse import load_plan, plan, plan_text, save_plan
from dynsparse.popsparse.dense import planner as dense_planner
from dynsparse.popsparse.planner import stored
from dynsparse.popsparse.static import planner as static_planner

SMALL = Target(tiles=12)
KINDS = {
    "elements": {"density": 0.2},
    "blocks": {"density": 0.2, "block_size": 16, "passes": "forward,grad_input,grad_weight"},
    "float32": {"density": 0.5, "dtype": "float32", "passes": "forward,grad_weight"},
    "without bound": {"density": 0.9, "options": {"available_memory_proportion": 1e-6}},
    "constrained": {"density": 0.3, "options": {"plan_constraints": {"partition": {"x": 2}}}},
    "dense": {
        "density": 0.2,
        "options": {"plan_constraints": {"use_dense": True}},
        "passes": "forward,grad_weight",
    },
}


@pytest.fixture
def warm(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("DYNSPARSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DYNSPARSE_CACHE_SIZE", str(1 << 20))
    return tmp_path / "cache"


def make(**changes):
    return plan(**{"out": 64, "in_": 96, "batch": 32, "density": 0.2, "target": SMALL, **changes})


def equal(one, other):
    """In all that they hold, the dense products, the target and the report's figures too."""
    parts = [(p, p.target, p.dense, p.search, p.costs) for p in (one, other)]
    return parts[0] == parts[1] and plan_text(one, 10) == plan_text(other, 10)


def said(caplog, words):
    return sum(one.startswith(words) for one in caplog.messages)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_from_the_cache_or_a_file_is_the_one_that_was_made(warm, tmp_path, caplog, kind):
    with caplog.at_level(logging.INFO, "dynsparse"):
        made = make(**KINDS[kind])
        found = make(**KINDS[kind])
    assert (said(caplog, "planned Fully"), said(caplog, "plan of Fully")) == (1, 1)
    assert {one.levelname for one in caplog.records} == {"INFO"}
    assert equal(made, found)
    assert found.dtype is made.dtype  # compared by identity
    assert found.options.partials_type is made.options.partials_type
    save_plan(made, tmp_path / "plan.json")
    assert equal(load_plan(tmp_path / "plan.json"), made)


SECOND = """
import logging, sys
from dynsparse.machine import Target
from dynsparse.popsparse import plan, save_plan
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
save_plan(plan(64, 96, 32, 0.2, target=Target(tiles=12)), sys.argv[1])
"""


def test_a_second_process_plans_nothing(warm, tmp_path):
    made = make()
    done = subprocess.run(
        [sys.executable, "-c", SECOND, str(tmp_path / "second.json")],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.startswith("plan of FullyConnectedParams(")
    assert " from the cache: " in done.stdout
    assert "planned" not in done.stdout
    assert equal(load_plan(tmp_path / "second.json"), made)


@pytest.mark.parametrize(
    "changes",
    [
        {"out": 128},
        {"batch": 16},
        {"density": 0.21},
        {"dtype": "float32"},
        {"block_size": 4},
        {"passes": "forward,grad_input"},
        {"target": SMALL.with_(sync_cycles=0)},
        {"target": SMALL.with_(name="other")},
        {"options": {"meta_info_bucket_oversize_proportion": 0.4}},
        {"options": {"plan_constraints": {"partition": {"y": 1}}}},
    ],
)
def test_whatever_a_plan_depends_on_makes_it_another(warm, caplog, changes):
    make()
    with caplog.at_level(logging.INFO, "dynsparse"):
        made = make(**changes)
    assert said(caplog, "planned ") == 1
    assert equal(make(**changes), made)


def test_another_planner_plans_anew(warm, caplog, monkeypatch):
    make()
    monkeypatch.setattr(stored, "_planner", lambda: "another")
    with caplog.at_level(logging.INFO, "dynsparse"):
        make()
    assert said(caplog, "planned ") == 1


@pytest.mark.parametrize(
    ("planner", "sources"),
    [
        ("planner.planning", stored.SOURCES),
        ("dense.planner", dense_planner.SOURCES),
        ("static.planner", static_planner.SOURCES),
    ],
)
def test_the_hash_covers_every_file_that_planning_runs(planner, sources):
    """What is below the machine checks arguments and keeps files: it settles no figure."""
    edges = test_imports.edges_of(test_imports.SOURCE)
    reached, todo = set(), [f"dynsparse.popsparse.{planner}"]
    while todo:
        name = todo.pop()
        if name not in reached and name.split(".")[1] in ("popsparse", "machine"):
            reached.add(name)
            todo += edges[name]
    paths = {f"{name.replace('.', '/').removeprefix('dynsparse/')}.py" for name in reached}
    assert len(paths) > 9
    assert {path for path in paths if not path.startswith(sources)} == set()
    package = test_imports.SOURCE / "dynsparse"
    assert all((package / source).exists() for source in sources)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"$": ["Plan", {}]}', b"no json"])
def test_an_entry_that_is_whole_but_no_plan_is_made_again(warm, caplog, content):
    made = make()
    kept = open_cache()
    (file,) = (kept.folder / "plans").iterdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(kept), "get", lambda *_: content)
        with caplog.at_level(logging.INFO, "dynsparse"):
            assert equal(make(), made)
    assert said(caplog, "planned ") == 1
    file.write_bytes(file.read_bytes()[:-1])
    caplog.clear()
    with caplog.at_level(logging.INFO, "dynsparse"):
        assert equal(make(), made)
        assert equal(make(), made)
    assert (said(caplog, "planned "), said(caplog, "plan of ")) == (1, 1)


def test_without_a_folder_to_write_to_plans_are_made(warm, caplog):
    warm.write_text("in the way")
    with caplog.at_level(logging.INFO, "dynsparse"):
        assert equal(make(), make())
    assert said(caplog, "planned ") == 2
    assert said(caplog, "the cache keeps nothing") == 2


def test_a_target_of_a_class_of_the_users_own_is_planned_for_and_not_kept(warm):
    class Own(Target):
        pass

    assert make(target=Own(tiles=12)).partition == make().partition
    assert open_cache().kinds()["plans"].entries == 1
    with pytest.raises(TypeError, match="known classes"):
        save_plan(make(target=Own(tiles=12)), warm / "plan.json")


def change(text, **changes):
    return json.dumps({**json.loads(text), **changes})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda text: text[:-1], "plan.json: "),
        (lambda text: "[]", "expected a plan as dynsparse saves it"),
        (lambda text: change(text, format="dynsparse plan 2"), "expected a plan"),
        (lambda text: change(text, planner="another"), "another planner"),
        (lambda text: change(text, plan=None), "damaged"),
        (lambda text: change(text, plan=[], checksum=stored._checksum([])), "expected a plan"),
    ],
)
def test_another_file_than_this_planners_is_refused_in_a_line(tmp_path, spoil, words):
    file = tmp_path / "plan.json"
    save_plan(make(), file)
    file.write_text(spoil(file.read_text()))
    with pytest.raises(ValueError, match=words) as error:
        load_plan(file)
    assert "\n" not in str(error.value)


def spoiled(plain, place, value):
    """A copy with another value at a place: names of fields, through the marks of classes."""
    found = json.loads(json.dumps(plain))
    fields = found["$"][1]
    for name in place[:-1]:
        fields = fields[name]["$"][1]
    fields[place[-1]] = value
    return found


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["partition", "x"], "2"),
        (["partition", "x"], 2.0),
        (["params", "batch_size"], -1),
        (["target", "tiles"], 10**30),
        (["target", "sync_cycles"], 10**400),
        (["target"], None),
        (["costs"], {"forward": 3}),
        (["block_dimensions"], [1, 1, 1]),
        (["search"], None),
        (["search", "bounds"], 3),
        (["method"], {"$": ["Method", "none"]}),
        (["dtype"], {"$": ["Plan", "float16"]}),
        (["dtype"], {"$": ["os.system", "true"]}),
        (["memory_bound"], True),
        (["more"], 1),
    ],
)
def test_a_field_that_no_plan_has_is_refused(place, value):
    plain = stored._OBJECTS.to_plain(make())
    with pytest.raises(ValueError, match=r"expected|must|valid|too large|known"):
        stored._plan(spoiled(plain, place, value))
    assert equal(stored._plan(plain), make())


def test_a_plan_for_another_target_than_the_present_ones_runs_from_its_file(tmp_path):
    """Made where there is none of it: the file says all there is to know."""
    made = make(target=replace(SMALL, name="elsewhere", tiles=6))
    save_plan(made, os.fspath(tmp_path / "plan.json"))
    assert load_plan(Path(tmp_path / "plan.json")).target == made.target
