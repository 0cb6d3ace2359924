"""Contents of a profile beside costs: variables per tile, live variables per step, the tree."""

import copy
import json
import pickle

import numpy as np
import pytest

from popsparse.machine import (
    BOOL,
    FLOAT,
    HALF,
    INT,
    Call,
    Codelet,
    Copy,
    Engine,
    Execute,
    Graph,
    If,
    In,
    Out,
    Repeat,
    RepeatWhileTrue,
    Sequence,
    Switch,
    Target,
    WriteUndef,
    codelets,
)

MOVE = Codelet("move", {"a": In(), "out": Out()}, lambda v: None, 1)


def chain():
    """Make copies a to b to c to d, on different tiles; a and d are always live."""
    graph = Graph(Target(tiles=6, sync_cycles=10))
    found = {
        "a": graph.add_variable(FLOAT, [4], "a", tiles=[0, 1, 1, 5]),
        "b": graph.add_variable(HALF, [6], "b", tiles=range(6)),
        "c": graph.add_variable(FLOAT, [4], "c", tiles=[0, 1, 1, 5]),
        "d": graph.add_variable(FLOAT, [4], "d", tiles=[0, 1, 1, 5]),
        "k": graph.add_constant(FLOAT, [2], 1.0, "k", tiles=[4, 4]),
    }
    up = graph.add_compute_set("up")
    graph.add_vertex(up, codelets.ADD, 4, {"a": found["k"], "b": found["k"], "out": own(graph)})
    steps = Sequence(
        Copy(found["a"], found["c"], name="first"),
        Execute(up),
        Copy(found["c"], found["d"], name="last"),
    )
    return Engine(graph, {"run": steps, "nothing": Sequence()})


def own(graph):
    return graph.add_variable(FLOAT, [2], "sums", tiles=4)


def test_variables_on_tiles_and_their_origin():
    profile = chain().run("run")
    found = {v.name: v for v in profile.contents.variables}
    assert found["a"].on == [(0, 1, 4), (1, 2, 8), (5, 6, 4)]
    assert found["b"].on == [(0, 6, 2)]
    assert {n: v.bytes for n, v in found.items()} == {
        "a": 16, "b": 12, "c": 16, "d": 16, "k": 8, "sums": 8
    }  # fmt: skip
    kinds = {n: v.kind for n, v in found.items()}
    assert kinds.pop("k") == "constant"
    assert kinds.pop("c") == "not always live"
    assert {*kinds.values()} == {"always live"}
    assert found["a"].dtype == "float32"
    (call,) = found["sums"].made_by
    assert call.startswith("test_machine_contents.py:")
    assert call.endswith(" own")


def test_live_variables_of_steps():
    profile = chain().run("run")
    names = [v.name for v in profile.contents.variables]
    held = {profile.steps[s].name: [names[i] for i in v] for s, v in profile.contents.live.items()}
    assert held == {"run/first": ["c"], "run/up": ["c"], "run/last": ["c"]}
    (vertices,) = profile.contents.vertices
    assert (profile.steps[vertices.step].name, vertices.codelet) == ("run/up", "add")
    assert vertices.on == [(4, 5, 1)]
    plain = json.loads(json.dumps(profile.to_dict()))
    assert plain["contents"]["live"] == [[0, [1]], [1, [1]], [2, [1]]]


def test_function_is_live_with_its_largest_caller():
    graph = Graph(Target(tiles=1))
    v = {n: graph.add_variable(FLOAT, [1], n, tiles=0) for n in "abcd"}
    graph.add_handle("d", v["d"])

    def move(source, to):
        one = graph.add_compute_set(f"{source} to {to}")
        graph.add_vertex(one, MOVE, 0, {"a": v[source], "out": v[to]})
        return Execute(one)

    shared = Call(move("a", "b"))
    program = Sequence(
        shared, move("b", "d"), move("a", "c"), shared, move("b", "d"), move("c", "d")
    )
    profile = Engine(graph, program).run()
    names = [one.name for one in profile.contents.variables]
    step = profile.steps.index(profile.step("a to b"))
    assert [names[i] for i in profile.contents.live[step]] == ["b", "c"]


class Bench:
    def __init__(self):
        self.graph = Graph(Target(tiles=2, sync_cycles=10))
        self.flag = self.graph.add_variable(BOOL, [], "flag", tiles=0)
        self.case = self.graph.add_variable(INT, [], "case", tiles=0)
        self.count = self.graph.add_variable(INT, [1], "count", tiles=0)
        self.more = self.graph.add_variable(BOOL, [1], "more", tiles=0)

    def execute(self, name, codelet=codelets.INCREMENT, **edges):
        made = self.graph.add_compute_set(name)
        edges = edges or {"value": self.count.expand_dims(0)}
        self.graph.add_vertices(made, codelet, np.array([0]), edges)
        return Execute(made)

    def tree(self, program, **values):
        for name, value in values.items():
            self.graph.set_initial_value(getattr(self, name), value)
        profile = Engine(self.graph, program).run()
        nodes = profile.tree()

        def shape(number, label, runs):
            node = nodes[number]
            parts = [shape(child, inside, count) for inside, child, count in node.parts]
            return (label, node.kind, node.name, runs, *parts)

        return profile, nodes, shape(0, "", nodes[0].runs)


def test_branches_not_taken():
    m = Bench()
    yes, no, other = (m.execute(name) for name in ("yes", "no", "other"))
    program = Sequence(
        Repeat(3, If(m.flag, yes, no, name="if")), Switch(m.case, {7: no, 8: yes}, other)
    )
    profile, nodes, shape = m.tree(program, flag=True, case=5)
    assert shape == (
        "", "Sequence", "", 1,
        ("", "Repeat", "", 1, ("", "If", "if", 3,
            ("then", "Execute", "yes", 3), ("otherwise", "Execute", "no", 0))),
        ("", "Switch", "", 1, ("case 7", "Execute", "no", 0), ("case 8", "Execute", "yes", 0),
            ("default", "Execute", "other", 1)),
    )  # fmt: skip
    assert nodes[0].cycles == profile.cycles
    by_name = {node.name: node for node in nodes}
    assert by_name["no"].cycles == by_name["no"].runs == 0
    assert by_name["yes"].cycles == profile.step("yes").cycles
    # The If: three tests, and what was inside.
    tests = profile.steps[by_name["if"].step].cycles
    assert by_name["if"].cycles == tests + profile.step("yes").cycles


def test_loops_and_functions():
    m = Bench()
    work = m.execute("work")
    function = Call(Sequence(work, name="function"))
    test = m.execute("test", codelets.NOT_ZERO, value=m.case.reshape(1), out=m.more)
    down = m.execute("down", codelets.DECREMENT, value=m.case.reshape(1))
    loop = RepeatWhileTrue(test, m.more.reshape(), Sequence(down, function), name="loop")
    profile, nodes, shape = m.tree(Sequence(loop, function, WriteUndef(m.count)), case=4)
    (_, _, _, _, (_, _, _, _, condition, body), call, undef) = shape
    assert condition == ("condition", "Execute", "test", 5)
    assert body[:4] == ("body", "Sequence", "", 4)
    assert call[1:4] == ("Call", "", 1)
    assert undef == ("", "WriteUndef", "", 1)
    by_name = {node.name: node for node in nodes}
    assert by_name["work"].runs == by_name["function"].runs == 5
    each = profile.step("work").cycles / 5
    assert by_name["loop"].cycles == pytest.approx(profile.cycles - each)
    assert nodes[0].cycles == pytest.approx(profile.cycles)


def test_profile_without_a_run_has_no_tree():
    report = chain().report()
    assert report.tree() == []
    assert report.to_dict()["tree"] == []
    assert len(report.to_dict()["contents"]["variables"]) == 6


def test_copies_and_pickles_without_graph():
    profile = chain().run("run")
    for other in (pickle.loads(pickle.dumps(profile)), copy.deepcopy(profile)):
        assert other.to_dict() == profile.to_dict()


def test_operations_of_codelets():
    graph = Graph(Target(tiles=2))
    a, b = (graph.add_variable(HALF, [2, 10], n, tiles=[0, 1]) for n in "ab")
    out = graph.add_variable(HALF, [2, 10], "out", tiles=[0, 1])
    total = graph.add_variable(FLOAT, [2], "total", tiles=[0, 1])
    steps = []
    for codelet, edges in (
        (codelets.ADD, {"a": a, "b": b, "out": out}),
        (codelets.DOT, {"a": a, "b": b, "out": total}),
        (codelets.FILL, {"out": out, "value": 0}),
    ):
        made = graph.add_compute_set(codelet.name)
        graph.add_vertices(made, codelet, [0, 1], edges)
        steps.append(Execute(made))
    profile = Engine(graph, Repeat(3, Sequence(*steps))).run()
    assert profile.step("add").flops == 3 * 20
    assert profile.step("dot product").flops == 3 * 2 * 2 * 10
    assert profile.step("fill").flops == 0
    assert profile.step("add").peak_flops == 128
    with pytest.raises(TypeError, match="flops must be a number or a function"):
        Codelet("x", {}, lambda v: None, 1, flops="many")
