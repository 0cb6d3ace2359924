"""Options of an engine; unknown ones raise."""

import json

import numpy as np
import pytest

from popsparse.machine import (
    FLOAT,
    HALF,
    Codelet,
    Engine,
    Execute,
    Graph,
    In,
    Out,
    OutOfMemoryError,
    ProgramError,
    Target,
)

SMALL = Target(tiles=2, bytes_per_tile=4096)
SQUARE = Codelet("square", {"a": In(), "out": Out()}, lambda v: np.square(v.a, out=v.out), 6)


def squares(elements=8, dtype=FLOAT, target=SMALL):
    graph = Graph(target)
    x = graph.add_variable(dtype, [2, elements], "x", tiles=[0, 1])
    y = graph.add_variable(dtype, [2, elements], "y", tiles=[0, 1])
    made = graph.add_compute_set("square")
    graph.add_vertices(made, SQUARE, [0, 1], {"a": x, "out": y})
    return graph, Execute(made)


def test_out_of_memory_can_be_profiled():
    with pytest.raises(OutOfMemoryError):
        Engine(*squares(600))
    engine = Engine(*squares(600), options={"debug.allowOutOfMemory": "true"})
    report = engine.report()
    assert report.memory.max_tile_bytes > 2 * 600 * 4
    assert "117" in report.summary()
    with pytest.raises(OutOfMemoryError, match="needs 4,"):
        engine.run()
    assert Engine(*squares(), options={"debug.allowOutOfMemory": True}).run().cycles > 0


def test_floating_point_exceptions():
    plain = Engine(*squares(dtype=HALF))
    plain.write("x", 1000)
    plain.run()
    assert np.isinf(plain.read("y")).all()
    strict = Engine(*squares(dtype=HALF), options={"debug.floatPointOpException": "true"})
    strict.write("x", 100)
    strict.run()
    strict.write("x", 1000)
    with pytest.raises(ProgramError, match="square: 'square': overflow"):
        strict.run()


def test_stacks_are_counted():
    plain = Engine(*squares()).memory_use
    stacked = Engine(*squares(), options={"target.workerStackSizeInBytes": "0x40"}).memory_use
    assert stacked.by_category["stacks"].tolist() == [6 * 64] * 2
    assert stacked.max_tile_bytes == plain.max_tile_bytes + 6 * 64


def test_reports_are_written(tmp_path):
    folder = tmp_path / "reports"
    options = {"autoReport.all": "true", "autoReport.directory": str(folder)}
    engine = Engine(*squares(), options=options)
    (memory,) = json.loads((folder / "memory.json").read_text())["runs"]
    assert memory["memory"]["limit"] == 4096
    assert not (folder / "profile.json").exists()
    engine.write("x", 1)
    cycles = [engine.run().cycles for _ in range(3)]
    runs = json.loads((folder / "profile.json").read_text())["runs"]
    assert [run["cycles"]["total"] for run in runs] == cycles[:2]
    one = {**options, "autoReport.outputGraphProfile": False}
    one["autoReport.executionProfileProgramRunCount"] = 1
    one["autoReport.directory"] = tmp_path / "other"
    engine = Engine(*squares(), options=one)
    engine.run(), engine.run()
    assert [file.name for file in (tmp_path / "other").iterdir()] == ["profile.json"]
    assert len(json.loads((tmp_path / "other" / "profile.json").read_text())["runs"]) == 1


def test_options_of_the_environment(tmp_path, monkeypatch):
    folder = tmp_path / "reports"
    options = {"autoReport.all": "true", "autoReport.directory": str(folder)}
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps(options))
    for _ in range(2):  # Each engine has a folder of its own.
        Engine(*squares()).run()
    parts = list(folder.iterdir())
    assert len(parts) == 2
    for part in parts:
        assert {file.name for file in part.iterdir()} == {"memory.json", "profile.json"}
    # Those given to an engine, and the variable of our own, come first.
    Engine(*squares(), options={"autoReport.all": "false"})
    given = tmp_path / "given"
    Engine(*squares(), options={"autoReport.directory": str(given)})
    assert [file.name for file in given.iterdir()] == ["memory.json"]
    monkeypatch.setenv("DYNSPARSE_ENGINE_OPTIONS", "{}")
    Engine(*squares()).run()
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("text", ["{", "[1]", '{"autoReport.al": "true"}'])
def test_bad_options_of_the_environment(text, monkeypatch):
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", text)
    with pytest.raises(ValueError, match="POPLAR_ENGINE_OPTIONS: "):
        Engine(*squares())


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"debug.allowOutOfMemry": "true"}, "unrecognised option 'debug.allowOutOfMemry': did you"),
        ({"opt.enableInlining": "true"}, "unrecognised option 'opt.enableInlining'"),
        ({"debug.allowOutOfMemory": "yes"}, "must be 'true' or 'false', got 'yes'"),
        ({"target.workerStackSizeInBytes": "-1"}, "a whole number of 0 or more, got '-1'"),
        ({"target.workerStackSizeInBytes": 1.5}, "a whole number of 0 or more, got 1.5"),
        ({"autoReport.directory": 3}, "the path of a folder, got 3"),
    ],
)
def test_bad_options(options, line):
    with pytest.raises(ValueError, match=line):
        Engine(*squares(), options=options)
    with pytest.raises(TypeError, match="options must be a mapping"):
        Engine(*squares(), options="debug.allowOutOfMemory")
