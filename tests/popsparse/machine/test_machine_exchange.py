import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from popsparse.machine import (
    FLOAT,
    HALF,
    UNSIGNED_SHORT,
    Copy,
    Engine,
    Graph,
    ProgramError,
    RaceError,
    Target,
    concat,
    rotation,
)
from popsparse.machine.exchange import plan_copy

# Four tiles, two buses; 4 bytes a cycle; no control cycles, so bytes alone count.
PLAIN = Target(tiles=4, bytes_per_tile=4096, exchange_fragment_cycles=0, sync_cycles=100)


def plan(target, pairs):
    return plan_copy(pairs[0][0].graph, target, pairs, "test")


def test_bytes_and_cycles_by_hand():
    graph = Graph(PLAIN)
    src = graph.add_variable(FLOAT, [10], "src", tiles=0)
    dst = graph.add_variable(FLOAT, [10], "dst")
    graph.set_tile_mapping(dst[:3], 0)
    graph.set_tile_mapping(dst[3:8], 1)
    graph.set_tile_mapping(dst[8:], 2)
    found = plan(PLAIN, [(src, dst)])
    assert found.received_bytes.tolist() == [0, 20, 8, 0]
    assert found.sent_bytes.tolist() == [28, 0, 0, 0]
    assert found.local_bytes.tolist() == [12, 0, 0, 0]
    assert found.fragments.tolist() == [0, 1, 1, 0]
    # The sender is the slowest: 28 bytes at 4 a cycle; 12 bytes at 8 a cycle stay.
    assert (found.exchange_cycles, found.local_cycles) == (7, 2)

    profile = Engine(graph, Copy(src, dst, name="move")).run()
    step = profile.step("move")
    assert (step.kind, step.sync, step.exchange, step.compute) == ("exchange", 100, 7, 2)
    assert profile.cycles == 109
    assert profile.received_bytes.tolist() == [0, 20, 8, 0]
    assert profile.tile_cycles.tolist() == [2, 0, 0, 0]


def test_neighbours_receiving_the_same_data_share_the_bus():
    graph = Graph(PLAIN)
    # Sent by two tiles, 100 bytes each, so that sending does not hide the receivers' rate.
    src = graph.add_variable(FLOAT, [50], "src")
    graph.set_tile_mapping(src[:25], 0)
    graph.set_tile_mapping(src[25:], 1)
    dst = graph.add_variable(FLOAT, [2, 50], "dst", tiles=[2, 3])
    found = plan(PLAIN, [(src.broadcast_to(2, 50), dst)])
    assert found.exchange_per_tile.tolist() == [25, 25, 25, 25]
    apart = graph.add_variable(FLOAT, [2, 50], "apart", tiles=[2, 3])
    # Tile 2 gets 50 elements, tile 3 the first 30 of them and 20 of its own elsewhere.
    other = graph.add_variable(FLOAT, [20], "other", tiles=1)
    pairs = [(src, apart[0]), (src[:30], apart[1, :30]), (other, apart[1, 30:])]
    found = plan(PLAIN, pairs)
    # 30 shared elements at 8 bytes a cycle, 20 at 4: (120 - 60 + 80) / 4.
    assert found.exchange_per_tile[2:].tolist() == [35, 35]
    alone = plan(PLAIN.with_(exchange_bus_tiles=1), pairs)
    assert alone.exchange_per_tile[2:].tolist() == [50, 50]


def test_fragments_cost_control_cycles():
    target = PLAIN.with_(exchange_fragment_cycles=3)
    graph = Graph(target)
    src = graph.add_variable(FLOAT, [6, 5], "src", tiles=0)
    dst = graph.add_variable(FLOAT, [5, 6], "dst", tiles=1)
    assert plan(target, [(src.reshape(5, 6), dst)]).fragments.tolist() == [0, 1, 0, 0]
    turned = plan(target, [(src.transpose(), dst)])
    assert turned.fragments.tolist() == [0, 30, 0, 0]
    assert turned.exchange_cycles == 90
    # Both sides turned alike: one fragment, however the copy lists it.
    alike = plan(target, [(src.transpose(), dst.reshape(6, 5).transpose())])
    assert alike.fragments.tolist() == [0, 1, 0, 0]


def test_local_copies_do_not_sync():
    graph = Graph(PLAIN.with_(local_copy_cycles=10))
    src = graph.add_variable(HALF, [3, 10], "src", tiles=[0, 1, 2])
    dst = graph.add_variable(HALF, [3, 10], "dst", tiles=[0, 1, 2])
    profile = Engine(graph, Copy(src, dst)).run()
    assert (profile.sync_cycles, profile.exchange_cycles, profile.compute_cycles) == (0, 0, 13)
    assert profile.steps[0].kind == "compute"


def test_several_types_in_one_copy():
    graph = Graph(PLAIN)
    pairs = []
    for dtype in (HALF, UNSIGNED_SHORT):
        src = graph.add_variable(dtype, [6], tiles=0)
        pairs.append((src, graph.add_variable(dtype, [6], tiles=1)))
    assert plan(PLAIN, pairs).received_bytes.tolist() == [0, 24, 0, 0]
    assert plan(PLAIN, pairs).exchange_cycles == 6


@pytest.mark.parametrize(("shift", "axis"), [(0, 0), (1, 1), (-1, 0), (2, 1), (7, 0)])
def test_rotations(shift, axis):
    graph = Graph(PLAIN)
    a = graph.add_variable(FLOAT, [3, 4], "a", tiles=[0, 1, 2])
    b = graph.add_variable(FLOAT, [3, 4], "b", tiles=[0, 1, 2])
    engine = Engine(graph, Copy(rotation(a, b, shift, axis)))
    values = np.arange(12.0).reshape(3, 4)
    engine.write(a, values)
    engine.run()
    np.testing.assert_array_equal(engine.read(b), np.roll(values, -shift, axis))
    with pytest.raises(ValueError, match="keeps the shape"):
        rotation(a, b[:2], 1)


def test_overlaps_raise():
    graph = Graph(PLAIN)
    v = graph.add_variable(FLOAT, [10], "v", tiles=0)
    w = graph.add_variable(FLOAT, [10], "w", tiles=1)
    with pytest.raises(RaceError, match="reads and writes the same elements of 'v'"):
        Engine(graph, Copy(v[:5], v[4:9]))
    with pytest.raises(RaceError, match="writes element 2 of 'w' twice"):
        Engine(graph, Copy([(v[:3], w[:3]), (v[:3], w[2:5])]))
    with pytest.raises(RaceError, match="twice"):
        Engine(graph, Copy(v, w[:5].broadcast_to(2, 5).reshape(10)))
    Engine(graph, Copy(v[:5], v[5:])).run()


def test_bad_copies():
    graph = Graph(PLAIN)
    v = graph.add_variable(FLOAT, [10], "v", tiles=0)
    h = graph.add_variable(HALF, [10], "h", tiles=0)
    c = graph.add_constant(FLOAT, [10], 1.0, "c", tiles=1)
    with pytest.raises(TypeError, match=r"float32 \('v'\) to float16 \('h'\): cast first"):
        Copy(v, h)
    with pytest.raises(ValueError, match=r"5 elements .* to 10"):
        Copy(v[:5], c)
    with pytest.raises(TypeError, match="a list of such pairs"):
        Copy(v)
    with pytest.raises(ProgramError, match="writes the constant 'c'"):
        Engine(graph, Copy(v, c))
    engine = Engine(graph, Copy(c, v))
    engine.run()
    assert engine.read("v").tolist() == [1.0] * 10


@st.composite
def mapped_copies(draw):
    """Draw variables with random mappings, and views of them to copy."""
    tiles = draw(st.integers(1, 6))
    graph = Graph(Target(tiles=tiles, exchange_bus_tiles=draw(st.integers(1, 2))))
    shape = [draw(st.integers(1, 5)), draw(st.integers(1, 5))]
    sides = []
    for name in ("src", "dst"):
        v = graph.add_variable(FLOAT, [*shape, 2], name)
        flat = v.flatten()
        graph.set_tile_mapping(v, draw(st.integers(0, tiles - 1)))
        for _ in range(draw(st.integers(0, 5))):
            cut = sorted(draw(st.tuples(*[st.integers(0, flat.numel)] * 2)))
            graph.set_tile_mapping(flat[cut[0] : cut[1]], draw(st.integers(0, tiles - 1)))
        sides.append(v)
    views = []
    order = draw(st.permutations(range(3)))
    for v in sides:
        if draw(st.booleans()):
            v = v.transpose(*order)
        if draw(st.booleans()):
            v = v.flatten()
        if draw(st.booleans()) and v.numel > 1:
            flat = v.flatten()
            v = concat([flat[1:], flat[:1]])
        views.append(v.flatten() if draw(st.booleans()) else v)
    return graph, *sides, *views


@settings(deadline=None, max_examples=150)
@given(mapped_copies())
def test_copies_equal_numpy(case):
    graph, whole_src, whole_dst, src, dst = case
    engine = Engine(graph, Copy(src, dst))
    values = np.arange(whole_src.numel, dtype=np.float32).reshape(whole_src.shape)
    engine.write(whole_src, values)
    profile = engine.run()
    base = whole_src.addresses().min(), whole_dst.addresses().min()
    expected = np.empty(whole_dst.numel, np.float32)
    from_, to = src.addresses().reshape(-1) - base[0], dst.addresses().reshape(-1) - base[1]
    expected[to] = values.reshape(-1)[from_]
    np.testing.assert_array_equal(engine.read(whole_dst).reshape(-1), expected)

    # Bytes, one element at a time.
    src_tiles, dst_tiles = graph.tiles_of(src).reshape(-1), graph.tiles_of(dst).reshape(-1)
    far = src_tiles != dst_tiles
    tiles = graph.target.tiles
    received = np.bincount(dst_tiles[far], minlength=tiles) * 4
    sent = np.bincount(src_tiles[far], minlength=tiles) * 4
    step = profile.steps[0]
    np.testing.assert_array_equal(step.received_bytes, received)
    np.testing.assert_array_equal(step.sent_bytes, sent)
    np.testing.assert_array_equal(
        step.local_bytes, np.bincount(dst_tiles[~far], minlength=tiles) * 4
    )


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_broadcast_cycles_element_by_element(data):
    tiles = data.draw(st.integers(1, 5))
    target = Target(tiles=tiles, exchange_fragment_cycles=data.draw(st.sampled_from([0, 3])))
    graph = Graph(target)
    n, receivers = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    tile = st.integers(0, tiles - 1)
    src_tiles = data.draw(st.lists(tile, min_size=n, max_size=n))
    dst_tiles = data.draw(st.lists(tile, min_size=receivers, max_size=receivers))
    src = graph.add_variable(FLOAT, [n], "src", tiles=src_tiles)
    dst = graph.add_variable(FLOAT, [receivers, n], "dst", tiles=dst_tiles)
    found = plan(target, [(src.broadcast_to(receivers, n), dst)])

    arrivals = [(e, to) for to in dst_tiles for e in range(n) if src_tiles[e] != to]
    heard = [{e for e, to in arrivals if to == t} for t in range(tiles)]
    received = [4 * sum(to == t for _, to in arrivals) for t in range(tiles)]
    sent = [4 * len({e for e, _ in arrivals if src_tiles[e] == t}) for t in range(tiles)]
    fragments = [0] * tiles
    for to in dst_tiles:
        for e in range(n):
            # Rows that follow each other on one tile are apart in the source.
            begins = e == 0 or src_tiles[e] != src_tiles[e - 1]
            fragments[to] += src_tiles[e] != to and begins
    expected = []
    for t in range(tiles):
        other = t ^ 1
        common = 4 * len(heard[t] & heard[other]) if other < tiles else 0
        payload = max((received[t] - common / 2) / 4, sent[t] / 4)
        expected.append(np.ceil(max(payload, target.exchange_fragment_cycles * fragments[t])))
    assert found.received_bytes.tolist() == received
    assert found.sent_bytes.tolist() == sent
    assert found.fragments.tolist() == fragments
    assert found.exchange_per_tile.tolist() == expected
