"""Plans in files: equal to those that are made, and never another's."""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import test_imports

from popsparse import load_plan, plan, plan_text, save_plan
from popsparse.machine import Target
from popsparse.planning import stored

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


def make(**changes):
    return plan(**{"out": 64, "in_": 96, "batch": 32, "density": 0.2, "target": SMALL, **changes})


def equal(one, other):
    """In all that they hold, the dense products, the target and the report's figures too."""
    parts = [(p, p.target, p.dense, p.search, p.costs) for p in (one, other)]
    return parts[0] == parts[1] and plan_text(one, 10) == plan_text(other, 10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_from_a_file_is_the_one_that_was_made(tmp_path, caplog, kind):
    with caplog.at_level(logging.INFO, "dynsparse"):
        made = make(**KINDS[kind])
    assert sum(one.startswith("planned Fully") for one in caplog.messages) == 1
    save_plan(made, tmp_path / "plan.json")
    found = load_plan(tmp_path / "plan.json")
    assert equal(found, made)
    assert found.dtype is made.dtype  # compared by identity
    assert found.options.partials_type is made.options.partials_type


def test_the_hash_covers_every_file_that_planning_runs():
    """What is below the machine checks arguments and keeps files: it settles no figure."""
    edges = test_imports.edges_of(test_imports.SOURCE)
    reached, todo = set(), ["popsparse.planning.search"]
    while todo:
        name = todo.pop()
        if name not in reached and name.startswith("popsparse."):
            reached.add(name)
            todo += edges[name]
    paths = {f"{name.replace('.', '/').removeprefix('popsparse/')}.py" for name in reached}
    assert len(paths) > 9
    assert {path for path in paths if not path.startswith(stored.SOURCES)} == set()
    package = test_imports.SOURCE / "popsparse"
    assert all((package / source).exists() for source in stored.SOURCES)


def test_a_target_of_a_class_of_the_users_own_is_planned_for_and_not_saved(tmp_path):
    class Own(Target):
        pass

    assert make(target=Own(tiles=12)).partition == make().partition
    with pytest.raises(TypeError, match="known classes"):
        save_plan(make(target=Own(tiles=12)), tmp_path / "plan.json")


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
