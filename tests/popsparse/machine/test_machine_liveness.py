import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from popsparse.machine import (
    BOOL,
    FLOAT,
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
    OutOfMemoryError,
    PrintTensor,
    Repeat,
    RepeatWhileTrue,
    Sequence,
    Switch,
    Target,
    WriteUndef,
    concat,
)
from popsparse.machine.memory import analyse
from popsparse.machine.tensor import Tensor

# Sizes in floats; each variable has its own power of two, so a sum says which are held.
SIZES = {"a": 1, "b": 2, "c": 4, "d": 8, "e": 16, "f": 32}
MOVE = Codelet("move", {"a": In(), "out": Out()}, lambda v: None, 1)


class Bench:
    def __init__(self):
        self.graph = Graph(Target(tiles=1))
        self.v = {n: self.graph.add_variable(FLOAT, [s], n, tiles=0) for n, s in SIZES.items()}
        self.flag = self.graph.add_variable(BOOL, [], "flag", tiles=0)
        self.case = self.graph.add_variable(INT, [], "case", tiles=0)
        for name, tensor in (("flag", self.flag), ("case", self.case)):
            self.graph.add_handle(name, tensor)

    def move(self, source, destination, part=slice(None)):
        one = self.graph.add_compute_set(f"{source} to {destination}")
        edges = {"a": self.v[source], "out": self.v[destination][part]}
        self.graph.add_vertex(one, MOVE, 0, edges)
        return Execute(one)

    def held(self, program):
        """Return the names that are always live, and the names of temporaries at the peak."""
        use = Engine(self.graph, program).memory_use
        always = int(use.by_category["always live"][0]) - 5
        return tuple(
            "".join(n for n, s in SIZES.items() if total // 4 & s)
            for total in (always, int(use.by_category["temporary"][0]))
        )


def test_chain_has_two_live_variables():
    m = Bench()
    chain = Sequence(*(m.move(*pair) for pair in ("ab", "bc", "cd", "de", "ef")))
    # a is read first, f by no one; then d and e are the largest pair.
    assert m.held(chain) == ("af", "de")


def test_undefined_and_partial_writes():
    m = Bench()
    parts = [m.move("a", "e", slice(0, 8)), m.move("a", "e", slice(8, 16)), m.move("e", "f")]
    # Two halves do not count as written whole: e might be wanted from the run before.
    assert m.held(Sequence(*parts))[0] == "abcdef"
    assert m.held(Sequence(WriteUndef(m.v["e"]), *parts)) == ("abcdf", "e")
    copies = Copy([(m.v["d"], m.v["e"][:8]), (m.v["f"][:8], m.v["e"][8:])])
    assert m.held(Sequence(copies, m.move("e", "a"))) == ("abcdf", "e")


def test_loops_keep_variables_read_in_the_next_iteration():
    m = Bench()
    turn = Sequence(m.move("b", "c"), m.move("c", "d"), m.move("d", "b"))
    # b comes round again; c and d only live inside a turn.
    assert m.held(Sequence(m.move("a", "b"), Repeat(3, turn), m.move("b", "f")))[1] == "cd"
    once = Sequence(m.move("a", "b"), turn, m.move("b", "f"))
    assert m.held(once)[1] == "cd"
    # e is made before the loop and read in it, so every step of the loop holds it.
    held = Sequence(m.move("a", "e"), Repeat(2, Sequence(m.move("b", "c"), m.move("e", "d"),
                    m.move("c", "f"), m.move("d", "f"))))  # fmt: skip
    assert m.held(held)[1] == "cde"
    assert m.held(Repeat(0, m.move("a", "b")))[1] == ""


def test_while_loops():
    m = Bench()
    body = Sequence(m.move("c", "d"), m.move("d", "f"))
    program = Sequence(
        m.move("a", "c"), RepeatWhileTrue(m.move("a", "e"), m.flag, body), m.move("e", "b")
    )
    # c may be wanted by a later turn; e is made anew by every condition, so not inside the body.
    assert m.held(program) == ("abf", "ce")
    program = Sequence(
        m.move("a", "c"),
        m.move("a", "e"),
        RepeatWhileTrue(Sequence(), m.flag, body),
        m.move("e", "b"),
    )
    assert m.held(program) == ("abf", "cde")


def test_branches_and_calls():
    m = Bench()
    function = Sequence(m.move("c", "d"), m.move("d", "f"))
    program = Sequence(
        m.move("a", "c"),
        m.move("a", "e"),
        If(m.flag, Call(function), m.move("e", "b")),
    )
    # In the function's branch e is not wanted any more.
    assert m.held(program) == ("abf", "ce")
    program = Sequence(m.move("a", "c"), Switch(m.case, [Call(function)], m.move("a", "f")))
    assert m.held(program) == ("abef", "cd")


def test_several_programs_share_memory():
    m = Bench()
    both = {
        "one": Sequence(m.move("a", "b"), m.move("b", "c")),
        "two": Sequence(m.move("a", "d"), m.move("d", "c")),
    }
    # One program's temporaries are free in the other.
    assert m.held(both) == ("acef", "d")
    # What one writes and the other reads stays.
    assert m.held({"one": m.move("a", "b"), "two": m.move("b", "c")})[0] == "abcdef"


def test_handles_and_initial_values_are_always_live():
    m = Bench()
    m.graph.add_handle("b", m.v["b"])
    m.graph.set_initial_value(m.v["c"], 1.0)
    program = Sequence(m.move("a", "b"), m.move("b", "c"), m.move("c", "d"), m.move("d", "e"))
    assert m.held(program) == ("abcef", "d")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 6000), min_size=1, max_size=5),
    st.lists(st.integers(0, 10**9), min_size=3, max_size=3),
    st.sampled_from(["listed", "sorted", "slice", "turned", "runs"]),
)
def test_variables_viewed_by_a_handle_are_always_live(sizes, numbers, kind):
    graph = Graph(Target(tiles=1))
    variables = [graph.add_variable(FLOAT, [n], tiles=0) for n in sizes]
    whole = np.concatenate([v.addresses() for v in variables])
    first, count, seed = numbers
    view, elements = variables[first % len(sizes)], np.zeros(0, np.int64)
    if kind in ("listed", "sorted") and len(whole):
        picked = np.random.default_rng(seed).choice(whole, count % 9000)
        elements = np.sort(picked) if kind == "sorted" else picked
        view = Tensor(graph, FLOAT, elements.shape, addresses=elements)
    elif kind == "runs":
        view = concat([v for v in variables for _ in range(2)])
    elif kind == "turned":
        view = view[::-2]
    elif kind == "slice":
        view = view[seed % (len(view) + 1) :]
    graph.add_handle("seen", view)
    steps = [step for v in variables for step in (WriteUndef(v), PrintTensor(v))]
    found = analyse(graph, [Sequence(*steps)])
    seen = np.isin(whole, view.addresses())
    of = np.repeat(np.arange(len(sizes)), sizes)
    # What is empty is never read, so it counts as wanted.
    expected = [bool(seen[of == i].any()) or not n for i, n in enumerate(sizes)]
    assert found.members(found.always).tolist() == expected


def test_error_names_the_step():
    graph = Graph(Target(tiles=2, bytes_per_tile=900))
    a, b, c, d = (graph.add_variable(FLOAT, [100], n, tiles=1) for n in "abcd")
    chain = [Copy(a, b, name="first"), Copy(b, c, name="second"), Copy(c, d, name="third")]
    with pytest.raises(OutOfMemoryError, match="needs 1,600 bytes at step 'second'"):
        Engine(graph, Sequence(*chain))
    use = Engine(graph, Sequence(*chain[:2]), check_memory=False).memory_use
    assert use.data_bytes.tolist() == [0, 1600]


def test_undefined_memory_is_poisoned():
    m = Bench()
    m.graph.set_initial_value(m.v["b"], 1.0)
    m.graph.set_initial_value(m.case, 1)
    engine = Engine(m.graph, Sequence(WriteUndef(m.v["b"]), WriteUndef(m.case)))
    engine.run()
    assert np.isnan(engine.read("b")).all()
    assert engine.read("case") != 1
