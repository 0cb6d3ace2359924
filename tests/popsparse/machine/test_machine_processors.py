"""Several processors: links, replicas of a program, virtual graphs."""

import json
import math

import numpy as np
import pytest

import popsparse
from dynsparse import SparsePattern
from popsparse.machine import (
    FLOAT,
    HALF,
    INT,
    Codelet,
    Copy,
    CrossReplicaCopy,
    Engine,
    Execute,
    Graph,
    If,
    InOut,
    MappingError,
    OutOfMemoryError,
    Parallel,
    Profile,
    ProgramError,
    Repeat,
    RepeatWhileTrue,
    Sequence,
    Sync,
    Target,
    codelets,
    exchange,
)

POD = Target.pod(
    2, tiles=4, clock_hz=1e9, link_bytes_per_second=0.5e9, host_read_bytes_per_second=1e9
)


def test_targets():
    whole = Target.pod(4)
    assert (whole.processors, whole.tiles, whole.processor_tiles) == (4, 4 * 1472, 1472)
    assert (whole.name, whole.clock_hz) == ("pod4-bow", 1.85e9)
    assert whole.share(2).processors == 2
    assert Target.pod(2, "mk2").clock_hz == 1.33e9
    assert Target.bow().whole_sync_cycles == 311
    assert whole.whole_sync_cycles == 600
    for wrong, line in (
        (lambda: Target.pod(2, tiles=3), "tiles must be a multiple of 4"),
        (lambda: Target.pod(2, "gc2"), "target must be one of mk2, bow"),
        (lambda: Target.pod(0), "processors must be an integer of at least 1"),
        (lambda: Target(tiles=8, processors=3), "tiles must be a multiple of 6"),
        (lambda: Graph(POD, replicas=3), "replicas must share 2 processors evenly, got 3"),
    ):
        with pytest.raises(ValueError, match=line):
            wrong()


def test_exchange_between_processors():
    graph = Graph(POD)
    a = graph.add_variable(FLOAT, [100], "a", tiles=0)
    near = graph.add_variable(FLOAT, [100], "near", tiles=1)
    far = graph.add_variable(FLOAT, [2, 100], "far", tiles=[4, 5])
    back = graph.add_variable(FLOAT, [100], "back", tiles=3)
    program = Sequence(
        Copy(a, near, name="on one"),
        Copy(a.expand_dims(0).broadcast_to(2, 100), far, name="to the other"),
        Copy([(near, far[0]), (far[1], back)], name="both ways"),
    )
    engine = Engine(graph, program)
    engine.write("a", np.arange(100))
    profile = engine.run()
    assert engine.read("back").tolist() == list(range(100))
    one = profile.step("on one")
    assert (one.sync, one.exchange, one.link_bytes) == (311, 100, 0)
    # Both tiles of the other processor hear what crosses once; 2 bytes a cycle over the links.
    other = profile.step("to the other")
    assert (other.sync, other.exchange, other.link_bytes) == (600, 200, 400)
    both = profile.step("both ways")
    assert (both.sync, both.exchange, both.link_bytes) == (600, 200, 800)
    assert profile.link_bytes == 1200
    assert "Links between processors: 1,200 bytes" in profile.summary()


def add_one(graph, tensor, tiles):
    one = graph.add_constant(tensor.dtype, tensor.shape, 1, "one", tiles=tiles)
    out = graph.add_variable(tensor.dtype, tensor.shape, "sum", tiles=tiles)
    made = graph.add_compute_set("add one")
    graph.add_vertices(made, codelets.ADD, tiles, {"a": tensor, "b": one, "out": out})
    return out, Execute(made)


def test_replicas_have_separate_memory():
    graph = Graph(POD, replicas=2)
    assert graph.target.tiles == 4
    x = graph.add_variable(FLOAT, [4, 6], "x", tiles=np.arange(4))
    inputs = graph.add_stream("in", FLOAT, 24, to_device=True)
    outputs = graph.add_stream("out", FLOAT, 24, to_device=False)
    y, add = add_one(graph, x, np.arange(4))
    theirs = graph.add_variable(FLOAT, [4, 6], "theirs", tiles=np.arange(4))
    program = Sequence(
        Copy(inputs, x, name="load"),
        add,
        CrossReplicaCopy(y, theirs, {0: 1, 1: 0}, name="swap"),
        Copy(theirs, outputs, name="store"),
    )
    engine = Engine(graph, program)
    given = np.arange(48).reshape(2, 24)
    engine.connect("in", given)
    found = []
    engine.connect("out", lambda values: found.append(values.copy()))
    profile = engine.run()
    np.testing.assert_array_equal(found, given[::-1] + 1)
    for replica in (0, 1):
        np.testing.assert_array_equal(engine.read("sum", replica).reshape(-1), given[replica] + 1)
    # Both replicas load 96 bytes over one host link.
    assert profile.step("load").host == 2 * 96
    assert profile.step("load").from_host_bytes == 2 * 96
    swap = profile.step("swap")
    assert (swap.kind, swap.sync, swap.link_bytes) == ("links", 600, 2 * 96)
    assert swap.exchange == math.ceil(96 / 2)
    engine.write("x", 7, replica=1)
    assert engine.read("x", 0)[0, 0] == 0
    assert engine.read("x", 1)[0, 0] == 7
    with pytest.raises(ValueError, match="replica must be below 2, got 2"):
        engine.read("x", 2)


def test_replica_that_receives_nothing_keeps_its_data():
    graph = Graph(POD, replicas=2)
    x = graph.add_variable(INT, [3], "x", tiles=0)
    engine = Engine(graph, CrossReplicaCopy(x, x, {0: 1}))
    engine.write("x", [1, 2, 3], replica=0)
    engine.write("x", [4, 5, 6], replica=1)
    engine.run()
    assert [engine.read("x", r).tolist() for r in (0, 1)] == [[1, 2, 3]] * 2
    with pytest.raises(ProgramError, match="there are replicas 0 to 1, got 2"):
        Engine(graph, CrossReplicaCopy(x, x, {0: 2}))
    with pytest.raises(ProgramError, match="a replica receives from one other"):
        CrossReplicaCopy(x, x, {0: 1, 1: 1})
    y = graph.add_variable(INT, [4], "y", tiles=0)
    with pytest.raises(ProgramError, match=r"CrossReplicaCopy of int32 \[3\]"):
        CrossReplicaCopy(x, y, {0: 1})


def test_replicas_must_take_the_same_branches():
    graph = Graph(POD, replicas=2)
    n = graph.add_variable(INT, [1], "n", tiles=0)
    more = graph.add_variable("bool", [1], "more", tiles=0)
    down, test = graph.add_compute_set("down"), graph.add_compute_set("test")
    graph.add_vertices(down, codelets.DECREMENT, [0], {"value": n.expand_dims(0)})
    edges = {"value": n.expand_dims(0), "out": more.expand_dims(0)}
    graph.add_vertices(test, codelets.NOT_ZERO, [0], edges)
    engine = Engine(graph, RepeatWhileTrue(Execute(test), more, Execute(down)))
    engine.write("n", [3])
    assert engine.run().step("down").runs == 3
    engine.write("n", [2], replica=0)
    engine.write("n", [3], replica=1)
    with pytest.raises(ProgramError, match=r"replicas go different ways .*'more'.* 0, 1"):
        engine.run()
    Engine(graph, If(more, Execute(down)))


def test_virtual_graphs_number_their_tiles():
    graph = Graph(POD)
    second = graph.virtual(processor=1)
    assert (second.target.tiles, second.target.processors) == (4, 1)
    x = second.add_variable(FLOAT, [4, 2], "x", tiles=np.arange(4))
    assert graph.tiles_of(x)[:, 0].tolist() == [4, 5, 6, 7]
    assert second.tiles_of(x)[:, 0].tolist() == [0, 1, 2, 3]
    linear = second.add_variable(FLOAT, [8], "linear")
    second.map_linearly(linear)
    assert graph.tiles_of(linear).tolist() == [4, 4, 5, 5, 6, 6, 7, 7]
    pair = second.virtual(tiles=[2, 3])
    y = pair.add_variable(FLOAT, [2], "y", tiles=[0, 1])
    assert graph.tiles_of(y).tolist() == [6, 7]
    assert pair.tiles_of(x)[:, 0].tolist() == [-1, -1, 0, 1]
    both = graph.virtual(tiles=[0, 1, 4, 5])
    assert (both.target.processors, both.target.processor_tiles) == (2, 2)
    out, add = add_one(second, x, np.arange(4))
    engine = Engine(second, add)
    engine.write("x", 2)
    profile = engine.run()
    assert engine.read(out).tolist() == [[3, 3]] * 4
    assert np.flatnonzero(profile.tile_cycles).tolist() == [4, 5, 6, 7]
    for wrong, line in (
        ({}, "give one of them"),
        ({"processor": 2}, "processor must be below 2, got 2"),
        ({"tiles": [1, 1]}, "tiles must be distinct"),
        ({"tiles": [7, 8]}, "a virtual graph has tile 8; the target has tiles 0 to 7"),
        ({"tiles": [0, 1, 4]}, "as many tiles of each"),
    ):
        with pytest.raises((ValueError, MappingError), match=line):
            graph.virtual(**wrong)


def test_product_split_over_two_processors():
    one, two = (
        popsparse.Layer(popsparse.plan(64, 48, 16, 0.2, 4, "float32", target))
        for target in (Target.bow(tiles=16), Target.pod(2, tiles=8))
    )
    pattern = SparsePattern.random((64, 48), 0.2, block_size=4)
    x, values = np.random.default_rng(0).random((16, 48)), np.ones(pattern.values_shape)
    results = []
    for layer in (one, two):
        layer.set_weights(pattern, values)
        results.append(layer.forward(x))
    np.testing.assert_array_equal(*results)
    here, there = (layer.profiles["forward"] for layer in (one, two))
    assert (here.link_bytes, there.link_bytes > 0) == (0, True)
    assert there.sync_cycles > here.sync_cycles
    assert there.compute_cycles == here.compute_cycles


def test_product_on_each_of_two_processors():
    """The original's sharded case: 16 x 16 twice, half, batch 16, density 0.1, two processors."""
    graph = Graph(Target.pod(2, tiles=8))
    params = popsparse.FullyConnectedParams(popsparse.SparsityParams(1), 0.1, 16, 1, 16, 16)
    program, made = Sequence(), []
    x = None
    for processor in (0, 1):
        part = graph.virtual(processor=processor)
        weights = popsparse.create_fully_connected_weights(
            part, "float16", params, name=f"weights {processor}"
        )
        if x is None:
            x = popsparse.create_fully_connected_input(part, "float16", params)
            graph.add_handle("x", x)
        # What the first made lies on the other processor and is brought over.
        x = popsparse.fully_connected_forward(part, weights, x, params, program)
        graph.add_handle(f"meta-info {processor}", weights.meta_info)
        graph.add_handle(f"values {processor}", weights.nz_values)
        made.append(weights)
    graph.add_handle("y", x)
    engine = Engine(graph, program)
    rng = np.random.default_rng(0)
    given = rng.standard_normal((16, 16)).astype(np.float16)
    wanted = given.astype(np.float64)
    for processor, weights in enumerate(made):
        pattern = SparsePattern.random((16, 16), 0.1)
        values = rng.standard_normal(pattern.nnz).astype(np.float16)
        encoded = popsparse.Partitioner(weights.plan).encode(pattern, values)
        engine.write(f"meta-info {processor}", encoded.meta_info)
        engine.write(f"values {processor}", encoded.nz_values)
        wanted = wanted @ pattern.to_scipy(values.astype(np.float64)).todense().T
    engine.write("x", given)
    profile = engine.run()
    np.testing.assert_allclose(engine.read("y"), wanted, atol=0.01, rtol=0.01)
    assert profile.link_bytes == 16 * 16 * 2
    assert (profile.tile_cycles > 0).reshape(2, 8).any(1).all()
    assert graph.tiles_of(made[1].values).min() >= 8
    assert HALF.size == 2


def busy_for(graph, processor, cycles, tensor):
    """Make a step that adds 1 to a tensor on tile 0 of a processor."""
    codelet = Codelet(
        f"busy {cycles}", {"x": InOut()}, lambda v: np.add(v.x, 1, out=v.x),
        cycles=lambda v: cycles, runs_on="supervisor",
    )  # fmt: skip
    made = graph.add_compute_set(f"busy {cycles}")
    graph.virtual(processor=processor).add_vertex(made, codelet, 0, {"x": tensor})
    return Execute(made)


def test_branches_of_processors_run_concurrently():
    graph = Graph(POD)
    x, y = (graph.add_variable(FLOAT, [2], name, tiles=t) for name, t in (("x", 0), ("y", 4)))
    z = graph.virtual(processor=1).add_variable(FLOAT, [2], "z", tiles=1)
    short, long = busy_for(graph, 0, 100, x), busy_for(graph, 1, 400, y)
    first = Repeat(3, short)
    second = Sequence(long, Copy(y, z, name="on chip"))
    send = Copy(z, x, name="send")
    engine = Engine(graph, Sequence(Parallel({0: first, 1: second}, name="both"), send))
    engine.write("x", 0)
    engine.write("y", 5)
    profile = engine.run()
    assert (engine.read("z")[0], engine.read("x")[0]) == (6, 6)
    # The second branch: 400, a superstep of its own processor alone and one fragment.
    longest = 400 + 311 + 3
    assert profile.step("on chip").sync == 311
    assert profile.cycles == longest + profile.step("send").cycles
    assert profile.parallel_cycles == longest
    assert profile.busy.tolist() == [300, longest]
    assert profile.idle.tolist() == [1 - 300 / longest, 0]
    assert profile.overlapped_cycles == 300
    assert sum(profile.parts.values()) == profile.cycles + 300
    root, *inside = profile.tree()
    both = next(node for node in inside if node.name == "both")
    assert (root.cycles, both.cycles) == (profile.cycles, longest)
    assert "of 714 in which processors ran at once, idle for 58%, 0%" in profile.summary()
    again = Profile.from_dict(json.loads(json.dumps(profile.to_dict())))
    assert (again.cycles, again.idle.tolist()) == (profile.cycles, profile.idle.tolist())


def test_branches_stay_on_their_processors():
    graph = Graph(POD)
    x, y = (graph.add_variable(FLOAT, [2], name, tiles=t) for name, t in (("x", 0), ("y", 4)))
    stream = graph.add_stream("in", FLOAT, 2, to_device=True)
    step = busy_for(graph, 1, 10, y)
    for branches, line in (
        ({0: step}, "'busy 10' is in the branch of processor 0 of 'p' and uses tile 4, of"),
        ({1: Copy(x, y, name="send")}, "'send' is in the branch of processor 1 of 'p' and uses"),
        ({0: Copy(stream, x)}, "a branch of 'p' cannot contain Copy"),
        ({1: Sync()}, "a branch of 'p' cannot contain Sync: a branch computes and copies on"),
        ({2: step}, "is for processor 2; the target has processors 0 to 1"),
    ):
        with pytest.raises(ProgramError, match=line):
            Engine(graph, Parallel(branches, name="p"))
    with pytest.raises(TypeError, match="branches must be programs by processor"):
        Parallel([step])


@pytest.mark.parametrize(
    ("start", "end", "loads"),
    [
        # From, to, how many links: a pair has four for itself, a way on has two.
        (0, 1, [(0, 1, 4)]),
        (0, 2, [(0, 2, 2)]),
        (0, 3, [(0, 1, 2), (1, 3, 2)]),
        (5, 0, [(5, 4, 2), (4, 2, 2), (2, 0, 2)]),
        (6, 1, [(6, 4, 2), (4, 2, 2), (2, 0, 2), (0, 1, 2)]),  # the seventh of seven
        (1, 6, [(1, 0, 2), (0, 2, 2), (2, 4, 2), (4, 6, 2)]),
    ],
)
def test_route_between_processors(start, end, loads):
    route = exchange._route(start, end, 7)
    assert [(a, b, count) for (a, b, _), count in route] == loads


def test_busiest_link_determines_the_time():
    pod = Target.pod(4, tiles=2, clock_hz=1e9, link_bytes_per_second=1e9)
    links = np.zeros((4, 4))
    links[0, 1] = 400  # 100 cycles on four links
    assert exchange.link_cycles(pod, links) == 100
    links[0, 3] = 100  # across the rung beside it, on two links of its own, and up the rail
    assert exchange.link_cycles(pod, links) == 100
    links[1, 3] = 200  # on the same rail: 100 + 200 on two links
    assert exchange.link_cycles(pod, links) == 150
    links[3, 1] = 300  # the other way is free
    assert exchange.link_cycles(pod, links) == 150


def test_remote_buffers_have_a_capacity():
    graph = Graph(Target.pod(2, tiles=2, remote_bytes=1000))
    near, far = (graph.add_variable(FLOAT, [100], n, tiles=t) for n, t in (("a", 0), ("b", 2)))
    first, second = (graph.add_remote_buffer(name, FLOAT, 100, 2) for name in ("one", "two"))
    index = graph.add_constant(INT, [1], 0, "row", tiles=0)
    Engine(graph, Sequence(*(Copy(t, b, index=index) for t, b in ((near, first), (far, second)))))
    program = Sequence(*(Copy(near, buffer, index=index) for buffer in (first, second)))
    line = "beside processor 0 take 1,600 bytes, with 'two', of the 1,000 that it has"
    with pytest.raises(OutOfMemoryError, match=line):
        Engine(graph, program)
    line = "remote buffers take 2,400 bytes, with 'three', of the 2,000 beside 2 processors"
    with pytest.raises(OutOfMemoryError, match=line):
        graph.add_remote_buffer("three", FLOAT, 100, 2)
