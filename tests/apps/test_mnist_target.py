"""`dynsparse mnist --target`: the sparse layers and their growth on a simulated tile machine."""

import json
import math

import pytest

from dynsparse.cli.app import run
from popsparse.torch_layer import TileMachine

SHORT = [
    "mnist", "--hidden-sizes", "32", "--batch-size", "16", "--epochs", "1",
    "--steps-per-epoch", "8", "--update-interval", "3", "--seed", "0", "--droprate", "0",
]  # fmt: skip


def figures(tmp_path, *more):
    file = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
    assert run([*SHORT, *more, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_it_trains_as_the_cpu_does(tmp_path, monkeypatch):
    calls, scored = [], []
    scores = TileMachine.scores
    monkeypatch.setattr(TileMachine, "scores", lambda *a: calls.append(1) or scores(*a))
    there = figures(tmp_path, "--target", "bow", "--tiles", "24")
    scored.append(len(calls))
    here = figures(tmp_path)
    scored.append(len(calls))
    assert there["replaced"] == here["replaced"] > 0
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-4)
    assert there["train_loss"] == pytest.approx(here["train_loss"], rel=1e-4)
    assert scored == [2 * there["updates"]] * 2  # of both layers, and only on the machine
    assert not any("target" in layer for layer in here["layers"])


def test_it_says_what_the_machine_took(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "profiles"
    options = {"autoReport.all": "true", "autoReport.directory": str(folder)}
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps(options))
    there = figures(tmp_path, "--target", "bow", "--tiles", "24")
    for layer in there["layers"]:
        passes = layer["target"]
        assert {"forward", "grad_weight", "scores", "rewire"} <= passes.keys()
        for name, taken in passes.items():
            assert taken["seconds"] == pytest.approx(taken["cycles"] / 1.85e9)
            assert 0 < taken["max_tile_bytes"] < 638_976
            assert ("tflops" in taken) == (name not in ("scores", "rewire"))
        # Two operations for each weight and sample; 13 of the 1,437 are left for the last batch.
        taken = passes["grad_weight"]
        expected = 2 * 13 * layer["weights"] / taken["seconds"] / 1e12
        assert taken["tflops"] == pytest.approx(expected)
        # All scores in float32, and the values, go to the host.
        assert passes["scores"]["to_host_bytes"] >= 4 * math.prod(layer["shape"])
    shown = capsys.readouterr().out
    assert "Last run of each pass" in shown
    assert f"{there['layers'][0]['target']['forward']['cycles']:,.0f}" in shown
    stored = sorted(folder.rglob("profile.json"))
    assert run(["report", str(stored[0]), "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size


def test_what_does_not_fit_the_tiles_is_one_line(tmp_path, capsys):
    assert run(["mnist", "--target", "mk2", "--tiles", "1", "--update-interval", "2"]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("dynsparse: layer 'fc1': tile 0 needs")
    assert "\n" not in told


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--target gc200", "--target: expected one of bow, mk2, got 'gc200'"),
        ("--tiles 8", "--tiles: applies to runs with --target, got none"),
        ("--target bow --method topkast", "--target: applies to --method rigl,"),
        ("--target bow --data-type float64", "applies to --data-type float32, got --data-type"),
        ("--target bow --densities 1 1", "applies to networks with sparse layers"),
    ],
)
def test_where_it_does_not_apply(line, words, capsys):
    assert run([*SHORT, *line.split()]) == 2
    assert words in capsys.readouterr().err
