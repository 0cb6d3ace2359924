import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from popsparse.machine import (
    BOOL,
    FLOAT,
    HALF,
    INT,
    Codelet,
    Copy,
    Engine,
    Execute,
    Graph,
    If,
    In,
    InOut,
    LocalityError,
    MappingError,
    Out,
    OutOfMemoryError,
    ProgramError,
    RaceError,
    Ragged,
    Repeat,
    RepeatWhileTrue,
    Sequence,
    Target,
    WriteUndef,
    codelets,
    concat,
)

SMALL = Target(tiles=4, bytes_per_tile=4096)


def nothing(v):
    pass


READ = Codelet("read", {"a": In()}, nothing, 1)
WRITE = Codelet("write", {"out": Out()}, nothing, 1)
BOTH = Codelet("both", {"a": In(), "out": Out()}, nothing, 1)


def compiled(graph, *vertices):
    """Make an engine for one compute set of the given (codelet, tile, fields)."""
    one = graph.add_compute_set("one")
    for codelet, tile, fields in vertices:
        graph.add_vertex(one, codelet, tile, fields)
    return Engine(graph, Execute(one))


def test_unmapped_elements():
    graph = Graph(SMALL)
    v = graph.add_variable(FLOAT, [10], "v")
    with pytest.raises(MappingError, match="elements 0 to 9 of 'v' are mapped to no tile"):
        Engine(graph, Sequence())
    graph.set_tile_mapping(v[:4], 1)
    graph.set_tile_mapping(v[7:], 1)
    with pytest.raises(MappingError, match=r"elements 4 to 6 of 'v' .* set_tile_mapping"):
        Engine(graph, Sequence())
    graph.set_tile_mapping(v[4:7], 3)
    Engine(graph, Sequence())
    assert graph.tiles_of(v).tolist() == [1, 1, 1, 1, 3, 3, 3, 1, 1, 1]


def test_refused_variables_are_not_added():
    graph = Graph(Target.mk2(tiles=4))
    with pytest.raises(MappingError):
        graph.add_variable(FLOAT, [4], "x", tiles=4)
    with pytest.raises(MappingError):
        graph.add_constant(FLOAT, [4], 1, "x", tiles=4)
    with pytest.raises(ValueError, match="broadcast"):
        graph.add_constant(FLOAT, [4], [1, 2], "x", tiles=3)
    graph.add_variable(FLOAT, [4], "x", tiles=3)
    engine = Engine(graph, Sequence())
    engine.write("x", 2)
    assert engine.read("x").tolist() == [2] * 4
    assert engine.counts["variables"] == 1


def test_constants_fit_their_type():
    graph = Graph(SMALL)
    with pytest.raises(ValueError, match="int32 holds -2147483648 to 2147483647, got 4294967296"):
        graph.add_constant(INT, [2], 2**32, tiles=0)
    with pytest.raises(TypeError, match="expected integers, got float64"):
        graph.add_constant(INT, [2], [0.5, 1.5], tiles=0)
    with pytest.raises(TypeError, match="expected integers"):
        graph.set_initial_value(graph.add_variable(INT, [2], tiles=0), 0.5)


def test_nonexistent_tiles():
    graph = Graph(SMALL)
    v = graph.add_variable(FLOAT, [2, 3], "v")
    with pytest.raises(MappingError, match="'v' is mapped to tile 4; the target has tiles 0 to 3"):
        graph.set_tile_mapping(v, 4)
    with pytest.raises(MappingError, match="tile -1"):
        graph.set_tile_mapping(v, [0, -1])
    with pytest.raises(MappingError, match="must match the leading dimensions"):
        graph.set_tile_mapping(v, [0, 1, 2])
    one = graph.add_compute_set("one")
    with pytest.raises(MappingError, match="'read' is placed on tile 4"):
        graph.add_vertices(one, READ, np.array([0, 4]), {"a": v})


def test_linear_mapping():
    graph = Graph(SMALL)
    v = graph.add_variable(FLOAT, [2, 9], "v")
    graph.map_linearly(v)
    assert np.bincount(graph.tiles_of(v).flatten()).tolist() == [5, 5, 5, 3]
    graph.map_linearly(v, grain=4)
    assert np.bincount(graph.tiles_of(v).flatten()).tolist() == [8, 8, 2]
    graph.map_linearly(v, min_per_tile=8)
    assert np.bincount(graph.tiles_of(v).flatten()).tolist() == [9, 9]


def test_vertices_touch_only_their_tile():
    graph = Graph(SMALL)
    v = graph.add_variable(FLOAT, [4, 3], "v", tiles=[0, 1, 2, 3])
    message = (
        r"'one': vertex 0 of 'read' on tile 1 is connected by 'a' to element 6 of 'v' on tile 2"
    )
    with pytest.raises(LocalityError, match=message):
        compiled(graph, (READ, 1, {"a": v[1:3]}))
    one = graph.add_compute_set("many")
    graph.add_vertices(one, READ, np.array([0, 1, 3, 3]), {"a": v})
    with pytest.raises(LocalityError, match="vertex 2 of 'read' on tile 3"):
        Engine(graph, Execute(one))
    ragged = graph.add_compute_set("ragged")
    edge = Ragged(v.flatten(), [0, 0, 4])
    graph.add_vertices(ragged, READ, np.array([1, 0]), {"a": edge})
    with pytest.raises(LocalityError, match="vertex 1 of 'read' on tile 0"):
        Engine(graph, Execute(ragged))


def test_races():
    graph = Graph(SMALL)
    v = graph.add_variable(FLOAT, [10], "v", tiles=0)
    w = graph.add_variable(FLOAT, [10], "w", tiles=0)
    compiled(graph, (WRITE, 0, {"out": v[:5]}), (WRITE, 0, {"out": v[5:]}))
    compiled(graph, (READ, 0, {"a": v}), (READ, 0, {"a": v}))
    compiled(graph, (BOTH, 0, {"a": v, "out": v}))
    compiled(graph, (BOTH, 0, {"a": v[::2], "out": v[1::2]}))
    compiled(graph, (BOTH, 0, {"a": v, "out": w[:5]}), (BOTH, 0, {"a": v, "out": w[5:]}))
    with pytest.raises(RaceError, match=r"4 of 'v': vertex 0 \('write'\) writes .*vertex 1"):
        compiled(graph, (WRITE, 0, {"out": v[:5]}), (WRITE, 0, {"out": v[4:8]}))
    with pytest.raises(RaceError, match=r"vertex 0 \('read'\) reads"):
        compiled(graph, (READ, 0, {"a": v[2:3]}), (WRITE, 0, {"out": v}))
    inout = Codelet("inout", {"a": InOut()}, nothing, 1)
    with pytest.raises(RaceError, match="race on element 9 of 'v'"):
        compiled(graph, (inout, 0, {"a": v}), (inout, 0, {"a": concat([w, v[9:]])}))
    one = graph.add_compute_set("broadcast")
    graph.add_vertices(one, WRITE, np.zeros(3, int), {"out": v.broadcast_to(3, 10)})
    with pytest.raises(RaceError, match="'broadcast'"):
        Engine(graph, Execute(one))


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 4), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
def test_races_against_sets(edges):
    graph = Graph(SMALL)
    v = graph.add_variable(FLOAT, [14], "v", tiles=0)
    one = graph.add_compute_set("one")
    reads, writes = {}, {}
    for vertex in range(4):
        mine = [e for e in edges if e[0] == vertex]
        fields, values = {}, {}
        for i, (_, start, length, is_write) in enumerate(mine):
            fields[f"e{i}"] = Out() if is_write else In()
            values[f"e{i}"] = v[start : start + length]
            touched = writes if is_write else reads
            touched.setdefault(vertex, set()).update(range(start, start + length))
        if mine:
            graph.add_vertex(one, Codelet(f"c{vertex}", fields, nothing, 1), 0, values)
    races = any(
        a != b and mine & theirs
        for a, mine in writes.items()
        for others in (reads, writes)
        for b, theirs in others.items()
    )
    if races:
        with pytest.raises(RaceError):
            Engine(graph, Execute(one))
    else:
        Engine(graph, Execute(one))


def test_constants_are_not_written():
    graph = Graph(SMALL)
    c = graph.add_constant(HALF, [3], [1, 2, 3], "c", tiles=1)
    with pytest.raises(ProgramError, match="'write' writes the constant 'c' through 'out'"):
        compiled(graph, (WRITE, 1, {"out": c[1:]}))
    with pytest.raises(ProgramError, match="WriteUndef writes the constant 'c'"):
        Engine(graph, WriteUndef(c))
    with pytest.raises(ProgramError, match="'c' is a constant and cannot be written"):
        Engine(graph, Sequence()).write("c", 0)
    stream = graph.add_stream("in", HALF, 3, to_device=True)
    with pytest.raises(ProgramError, match="writes the constant 'c'"):
        Engine(graph, Copy(stream, c))
    assert compiled(graph, (READ, 1, {"a": c})).read("c").tolist() == [1, 2, 3]


def test_field_errors():
    graph = Graph(SMALL)
    v = graph.add_variable(FLOAT, [4], "v", tiles=0)
    one = graph.add_compute_set("one")
    takes_half = Codelet("takes half", {"a": In(HALF)}, nothing, 1, scalars=("by",))
    with pytest.raises(TypeError, match=r"takes float16, got float32 \('v'\)"):
        graph.add_vertex(one, takes_half, 0, {"a": v, "by": 1})
    with pytest.raises(ValueError, match=r"takes \['a', 'by'\], got \['a'\]"):
        graph.add_vertex(one, takes_half, 0, {"a": v})
    with pytest.raises(ValueError, match=r"takes \['a'\], got \['a', 'b'\]"):
        graph.add_vertex(one, READ, 0, {"a": v, "b": v})
    with pytest.raises(ValueError, match="one entry for each of 3 vertices"):
        graph.add_vertices(one, READ, np.zeros(3, int), {"a": v})
    scaled = Codelet("scaled", {"a": In()}, nothing, 1, scalars=("by",))
    with pytest.raises(ValueError, match=r"needs the shape \[4\], got \[3\]"):
        graph.add_vertices(one, scaled, np.zeros(4, int), {"a": v, "by": np.ones(3)})
    other = Graph(SMALL)
    with pytest.raises(ValueError, match="another graph"):
        other.add_vertex(one, READ, 0, {"a": v})
    with pytest.raises(ValueError, match="another graph"):
        other.set_tile_mapping(v, 0)
    with pytest.raises(ValueError, match="'count' cannot name a field"):
        Codelet("bad", {"count": In()}, nothing, 1)
    with pytest.raises(ValueError, match="both field and scalar"):
        Codelet("bad", {"a": In()}, nothing, 1, scalars=("a",))


def test_program_errors():
    graph = Graph(SMALL)
    v = graph.add_variable(FLOAT, [4], "v", tiles=0)
    flags = graph.add_variable(BOOL, [2], "flags", tiles=0)
    with pytest.raises(ProgramError, match=r"predicate of If must be one bool .* float32 \[4\]"):
        If(v, Sequence())
    with pytest.raises(ProgramError, match="predicate of RepeatWhileTrue"):
        RepeatWhileTrue(Sequence(), flags, Sequence())
    loop = Sequence(name="loop")
    loop.add(Repeat(2, loop))
    with pytest.raises(ProgramError, match="contains itself"):
        Engine(graph, loop)


def test_out_of_memory_names_the_largest_variables():
    target = Target(tiles=3, bytes_per_tile=1000)
    graph = Graph(target)
    graph.add_variable(FLOAT, [300], "large")
    graph.map_linearly(graph.variables[FLOAT][0].tensor)
    graph.add_variable(HALF, [350], "medium", tiles=2)
    graph.add_constant(INT, [5], 1, "small", tiles=2)
    message = (
        r"tile 2 needs 1,120 bytes and has 1,000 \(1 of 3 tiles are over\); its largest variables "
        r"in bytes: 'medium' 700, 'large' 400, 'small' 20"
    )
    with pytest.raises(OutOfMemoryError, match=message):
        Engine(graph, Sequence())
    engine = Engine(graph, Sequence(), check_memory=False)
    assert engine.memory_use.per_tile.tolist() == [400, 400, 1120]
    # Far too large is found out before the simulation takes memory for it.
    huge = Graph(target)
    huge.add_variable(FLOAT, [10**14], "huge", tiles=0)
    with pytest.raises(OutOfMemoryError, match="tile 0 needs 400,000,000,000,000 bytes"):
        Engine(huge, Sequence())
    assert engine.memory_use.by_category["constants"].tolist() == [0, 0, 20]
    full = Graph(target)
    full.add_variable(FLOAT, [250], tiles=0)
    Engine(full, Sequence())


def test_memory_of_vertices_and_exchange():
    graph = Graph(SMALL)
    a = graph.add_variable(FLOAT, [2, 4], "a", tiles=[0, 1])
    b = graph.add_variable(FLOAT, [2, 4], "b", tiles=[1, 1])
    code = Codelet("code", {"a": In()}, nothing, 1, scalars=("by",), code_bytes=100)
    one = graph.add_compute_set("one")
    graph.add_vertices(one, code, np.array([0, 1]), {"a": a, "by": 1})
    graph.add_vertices(one, code, np.array([1]), {"a": a[1:], "by": 2})
    use = Engine(graph, Sequence(Execute(one), Copy(a, b))).memory_use
    # A vertex: 4 for its codelet, 8 for an edge, 4 for a scalar. A fragment sent: 8, received: 12,
    # and 8 on each tile for the exchange.
    assert use.by_category["vertex state"].tolist() == [16, 32, 0, 0]
    assert use.by_category["vertex code"].tolist() == [100, 100, 0, 0]
    assert use.by_category["exchange code"].tolist() == [16, 20, 0, 0]
    assert use.by_category["always live"].tolist() == [16, 48, 0, 0]
    assert use.max_tile_bytes == 200
    assert use.worst_tile == 1


def test_memory_includes_stacks_and_control_code():
    """In bytes: 3,168 of stacks on tiles with vertices, and on every used tile 175 per step and 298
    for the host."""
    graph = Graph(Target.mk2(tiles=3))
    a = graph.add_variable(FLOAT, [2, 4], "a", tiles=[0, 1])
    b = graph.add_variable(FLOAT, [2, 4], "b", tiles=[1, 0])
    one = graph.add_compute_set("one")
    graph.add_vertices(one, codelets.FILL, [0], {"out": a[:1], "value": 1.0})
    program = Sequence(Execute(one), Copy(a, b), Copy(b, a))
    use = Engine(graph, program).memory_use.by_category
    assert use["stacks"].tolist() == [3168, 0, 0]
    assert use["control code"].tolist() == [3 * 175 + 298] * 2 + [0]
    # Each of both copies: an entry, a send and a receive.
    assert use["exchange code"].tolist() == [2 * (8 + 8 + 12)] * 2 + [0]


def test_exchange_code_of_many_fragments():
    """Strided copies have a pointer per receive. Data for two tiles is sent once; long sends take a
    second instruction."""
    graph = Graph(Target.mk2(tiles=3))
    src = graph.add_variable(FLOAT, [4, 5], "src", tiles=0)
    dst = graph.add_variable(FLOAT, [4, 6], "dst", tiles=1)
    far = graph.add_variable(FLOAT, [2, 100], "far", tiles=[1, 2])
    long = graph.add_variable(FLOAT, [100], "long", tiles=0)
    rows = Engine(graph, Copy(src, dst[:, :5])).memory_use.by_category["exchange code"]
    assert rows.tolist() == [8 + 4 * 8, 8 + 4 * (8 + 4), 0]
    heard = Copy(long.expand_dims(0).broadcast_to(2, 100), far)
    use = Engine(graph, heard).memory_use.by_category["exchange code"]
    assert use.tolist() == [8 + 8 + 4, 8 + 8 + 4, 8 + 8 + 4]


def test_empty_things():
    graph = Graph(SMALL)
    v = graph.add_variable(FLOAT, [0, 3], "v")
    one = graph.add_compute_set("one")
    graph.add_vertices(one, codelets.FILL, np.zeros(0, int), {"out": v, "value": 1.0})
    w = graph.add_variable(FLOAT, [0], "w", tiles=0)
    engine = Engine(graph, Sequence(Execute(one), Copy(v, w)))
    assert engine.run().cycles == 0
    assert engine.read("v").shape == (0, 3)
