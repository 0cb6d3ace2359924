"""Stored profiles: round trips, comparison, and one-line errors for damaged files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dynsparse.cli.app import run
from popsparse.machine import (
    BOOL,
    FLOAT,
    Copy,
    Engine,
    Execute,
    Graph,
    If,
    Repeat,
    Sequence,
    Target,
    codelets,
    rotation,
)
from popsparse.report import (
    compare,
    comparison_text,
    load_profile,
    memory_steps,
    operations,
    peak_step,
    profile_text,
    report_html,
    save_profile,
)


def program(turns=7, sync=10):
    graph = Graph(Target(tiles=5, sync_cycles=sync, exchange_fragment_cycles=0))
    a = graph.add_variable(FLOAT, [5, 4], "a", tiles=range(5))
    b = graph.add_variable(FLOAT, [5, 4], "b", tiles=range(5))
    c = graph.add_variable(FLOAT, [5, 8], "c", tiles=range(5))
    flag = graph.add_constant(BOOL, [], False, "flag", tiles=0)
    graph.add_handle("a", a)
    fill = graph.add_compute_set("fill")
    graph.add_vertices(fill, codelets.FILL, np.arange(5), {"out": b, "value": 1.0})
    wide = graph.add_compute_set("wide")
    graph.add_vertices(wide, codelets.FILL, np.arange(5), {"out": c, "value": 1.0})
    body = Sequence(Execute(fill), Copy(rotation(b, a, 1), name="rotate"), name="body")
    rare = If(flag, Sequence(Execute(wide), Copy(c[:, :4], a, name="never")), name="rare")
    return Engine(graph, Sequence(Repeat(turns, body), rare))


def test_round_trip(tmp_path):
    profile = program().run()
    file = save_profile(
        tmp_path / "a.json", title="A run", profile={"forward": profile}, summary={"rows": 3}
    )
    stored = load_profile(file)
    assert stored.title == "A run"
    (back,) = stored.profiles
    assert back.name == "forward"
    assert back.to_dict() == {**profile.to_dict(), "program": "forward"}
    page = report_html(title="A run", summary={"rows": 3}, profile={"forward": profile})
    assert report_html(**stored.page) == page
    # By hand: the step that fills b holds it, and what may never run holds c.
    names = [back.steps[step].name for step in memory_steps(back)]
    assert names == ["body/fill", "body/rotate", "rare/predicate", "rare/wide", "rare/never"]
    always, other = back.contents.over_steps(memory_steps(back))
    assert always.tolist() == [5 * 16 + 1] * 5
    assert other.tolist() == [80, 80, 0, 160, 160]
    assert back.steps[peak_step(back)].name == "rare/wide"
    assert [v.name for v, _ in back.contents.variables_on(0)] == ["c", "a", "b", "flag"]
    assert back.contents.variables_at(peak_step(back), tile=2)[0][1] == 32
    found = [(one.codelet, count) for one, count in back.contents.vertices_on(4)]
    assert found == [("fill", 1), ("fill", 1)]
    with pytest.raises(ValueError, match="tile must be 0 to 4, got 5"):
        back.contents.bytes_on(5)
    with pytest.raises(ValueError, match="step must be one of 5 with memory, got 77"):
        back.contents.variables_at(77)


def test_engine_reports_can_be_read(tmp_path):
    options = {"autoReport.all": "true", "autoReport.directory": tmp_path}
    first = program()
    engine = Engine(first.graph, first._programs[""], options=options)
    engine.run(), engine.run()
    stored = load_profile(tmp_path / "profile.json")
    assert [one.name for one in stored.profiles] == ["", " (run 2)"]
    (memory,) = load_profile(tmp_path / "memory.json").profiles
    assert memory.cycles == 0
    assert memory.contents.to_dict() == stored.profiles[0].contents.to_dict()
    assert "did not run" in profile_text("t", [memory])


def test_two_profiles_side_by_side():
    found = compare(program(7, sync=1).run(), {"other": program(14, sync=500).run()})
    (one,) = found.passes
    by_name = {pair.name: pair for pair in one.operations}
    assert by_name["body"].first * 1.9 < by_name["body"].second
    assert by_name["rare"].change > 1
    total = one.cycles[0]
    assert total.name == "all cycles"
    assert total.change == pytest.approx(total.second / total.first - 1)
    assert one.memory[0].change == 0
    assert [f.rule for f in one.came] == ["sync"]
    assert ("Synchronisation", None) in [(p.name, p.first) for p in one.findings]
    text = comparison_text(found)
    assert "New in B: synchronisation" in text
    assert f"{total.second:,.0f}" in text
    page = report_html(title="t", summary={}, profile=program().run(), compared=found)
    assert "<b>New in B:</b> synchronisation." in page
    several = compare({"x": program().run(), "y": program().run()}, {"y": program().run()})
    assert ([p.name for p in several.passes], several.only_first) == (["y"], ["x"])


@pytest.fixture
def stored(tmp_path):
    for name, turns in (("a", 7), ("b", 9)):
        save_profile(tmp_path / f"{name}.json", title=f"Run {name}", profile=program(turns).run())
    return tmp_path


def test_command(stored, capsys):
    page = stored / "page.html"
    arguments = [str(stored / "a.json"), "--compare", str(stored / "b.json"), "--output", str(page)]
    assert run(["report", *arguments]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Run a\n")
    assert "A: Run a, a.json\nB: Run b, b.json\n" in said
    assert "body" in said
    html = page.read_text("utf-8")
    assert "Compared" in html
    assert "not taken" in html
    assert run(["report", str(stored / "a.json"), "--output", str(stored / "no" / "p.html")]) == 2
    assert "--output: expected a file in a folder that can be written" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["a.json", "b.json", "link.json"])
def test_command_keeps_the_profiles_it_reads(output, stored, capsys):
    (stored / "link.json").symlink_to("a.json")
    files = {name: (stored / name).read_bytes() for name in ("a.json", "b.json")}
    arguments = [str(stored / "a.json"), "--compare", str(stored / "b.json")]
    assert run(["report", *arguments, "--output", str(stored / output)]) == 2
    assert "--output: expected another file than the profile" in capsys.readouterr().err
    assert files == {name: (stored / name).read_bytes() for name in files}


@pytest.mark.parametrize("method", ["dynamic", "static", "dense"])
def test_profile_stored_by_matmul_gives_its_page(method, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = "matmul --rows 64 --cols 48 --batch 8 --tiles 12 --dtype float32 --method"
    sparse = [] if method == "dense" else ["--density", "0.25", "--block-size", "4"]
    more = ["--report", "a.html", "--profile", "a.json", "--passes", "forward,grad_input"]
    assert run([*sizes.split(), method, *sparse, *more]) == 0
    assert run(["report", "a.json", "--output", "b.html"]) == 0
    assert "\nForward:\n" in capsys.readouterr().out
    assert (tmp_path / "a.html").read_text() == (tmp_path / "b.html").read_text()
    (forward, _) = load_profile(tmp_path / "a.json").profiles
    # Useful or not: what the tiles multiply is no less than the product asks for.
    wanted = 2 * 64 * 48 * 8 * (1 if method == "dense" else 0.25)
    assert sum(one.flops for one in operations(forward)) >= wanted
    assert all(v.made_by for v in forward.contents.variables)


def wrong(*path, value):
    """Change one entry of the stored file."""

    def change(content):
        at = content
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        return content

    return change


DAMAGED = {
    "not JSON": (lambda content: "{", "got no JSON of Unicode text"),
    "a list": (lambda content: [1], "the key 'format' must be 'dynsparse-profile'"),
    "foreign": (wrong("format", value="other"), "the key 'format' must be"),
    "later": (wrong("version", value=3), "version 2 is known here, got 3"),
    "a run": (wrong("runs", value=[{"program": "a"}]), "the key 'target' is missing"),
    "target": (wrong("runs", 0, "target", value=3), "profile: "),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_files_print_one_line(damage, stored, capsys):
    change, message = DAMAGED[damage]
    file = stored / "a.json"
    found = change(json.loads(file.read_text()))
    file.write_text(found if isinstance(found, str) else json.dumps(found))
    assert run(["report", str(file), "--output", str(stored / "page.html")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "a.json" in told
    assert message in told
    assert not (stored / "page.html").exists()


def test_unsupported_data_raises(tmp_path):
    with pytest.raises(ValueError, match="expected plain data for the file"):
        save_profile(tmp_path / "a", title="t", profile=program().run(), plan={"x": object()})
    with pytest.raises(FileNotFoundError):
        save_profile(tmp_path / "no" / "a", title="t", profile=program().run())
    assert list(tmp_path.iterdir()) == []
