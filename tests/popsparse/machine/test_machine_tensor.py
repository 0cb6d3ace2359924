import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from popsparse.machine import FLOAT, HALF, Graph, Target, concat
from popsparse.machine.dtypes import MappingError
from popsparse.machine.intervals import Runs, TileMap, refine, union_lengths
from popsparse.machine.tensor import Tensor

FAST = settings(deadline=None, max_examples=60)


def make_graph():
    return Graph(Target(tiles=8))


@st.composite
def views(draw):
    """Draw a tensor and the NumPy array of addresses after the same views."""
    graph = make_graph()
    graph.add_variable(FLOAT, [7])
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    tensor = graph.add_variable(FLOAT, shape)
    expected = tensor.addresses().copy()
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["slice", "transpose", "reshape", "index", "broadcast"]))
        if kind == "slice" and tensor.ndim:
            key = tuple(
                slice(
                    draw(st.integers(0, n - 1)),
                    None,
                    draw(st.sampled_from([1, 1, 2])),
                )
                for n in tensor.shape
            )
            tensor, expected = tensor[key], expected[key]
        elif kind == "transpose":
            axes = draw(st.permutations(range(tensor.ndim)))
            tensor, expected = tensor.transpose(*axes), expected.transpose(axes)
        elif kind == "reshape":
            new = draw(st.sampled_from([[-1], [1, -1], [-1, 1]]))
            if tensor.numel % 2 == 0:
                new = draw(st.sampled_from([new, [2, -1], [-1, 2]]))
            tensor, expected = tensor.reshape(new), expected.reshape(new)
        elif kind == "index" and tensor.ndim:
            at = draw(st.integers(-tensor.shape[0], tensor.shape[0] - 1))
            tensor, expected = tensor[at], expected[at]
        elif kind == "broadcast":
            new = [2, *tensor.shape]
            tensor, expected = tensor.broadcast_to(new), np.broadcast_to(expected, new)
    return tensor, expected


def test_tensor_of_runs_equals_its_elements():
    graph = make_graph()
    variable = graph.add_variable(FLOAT, [40])
    first = int(variable.addresses()[0])
    found = Runs(np.array([20, 3, 9]) + first, np.array([6, 2, 4]))
    long = Tensor(graph, FLOAT, [12], runs=found)
    listed = Tensor(graph, FLOAT, [12], addresses=found.addresses())
    assert not long.is_regular
    for view in (
        lambda t: t,
        lambda t: t.reshape(3, 4),
        lambda t: t.reshape(2, 6).transpose(1, 0),
        lambda t: t[2:9],
        lambda t: t.expand_dims(0),
        lambda t: t.broadcast_to(2, 12),
    ):
        np.testing.assert_array_equal(view(long).addresses(), view(listed).addresses())
        for leading in range(view(long).ndim + 1):
            pairs = zip(view(long).runs(leading), view(listed).runs(leading), strict=True)
            for one, other in pairs:
                np.testing.assert_array_equal(one, other)


@FAST
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), min_size=1, max_size=8),
    st.booleans(),
)
def test_tile_mapping_of_intervals(stretches, turned):
    tiles, lengths = np.array(stretches).T
    graph = make_graph()
    tensor = graph.add_variable(FLOAT, [2, int(lengths.sum())])[0]
    if turned:
        tensor = tensor[::-1]
    graph.map_stretches(tensor, tiles, lengths)
    np.testing.assert_array_equal(graph.tiles_of(tensor), np.repeat(tiles, lengths))
    with pytest.raises(MappingError, match="a tile for each of"):
        graph.map_stretches(tensor, tiles, lengths + 1)
    with pytest.raises(MappingError, match="the target has tiles 0 to 7"):
        graph.map_stretches(tensor, tiles + 8, lengths)


@FAST
@given(views(), st.data())
def test_views_equal_numpy(pair, data):
    tensor, expected = pair
    assert tensor.shape == expected.shape
    np.testing.assert_array_equal(tensor.addresses(), expected)
    leading = data.draw(st.integers(0, tensor.ndim))
    runs = tensor.runs(leading)
    listed, run = runs.addresses(), np.repeat(np.arange(len(runs.lengths)), runs.lengths)
    np.testing.assert_array_equal(listed, expected.reshape(-1))
    rows = int(np.prod(tensor.shape[:leading]))
    row = np.repeat(np.arange(rows), tensor.numel // rows)
    for r in range(len(runs.starts)):
        assert len(np.unique(row[run == r])) == 1
    low, high = tensor.extents()
    assert len(low) == len(high) == 1
    assert (low[0], high[0]) == (expected.min(), expected.max())


def test_extents_of_many_elements():
    graph = make_graph()
    tensor = graph.add_variable(FLOAT, [3, 5000])
    listed = tensor[[2, 0]]
    low, high = listed.extents()
    first = int(tensor.addresses()[0, 0])
    assert (low - first).tolist() == [10000, 0, 3192]
    assert (high - first).tolist() == [14095, 14999, 4999]
    assert [len(one) for one in graph.add_variable(FLOAT, [0]).extents()] == [0, 0]


@FAST
@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), min_size=2, max_size=4))
def test_long_intervals_are_joined_without_expansion(cuts):
    graph = make_graph()
    one, other = graph.add_variable(FLOAT, [3000]), graph.add_variable(FLOAT, [3000])
    parts = [(one, other)[i % 2].slice(min(c), max(c)) for i, c in enumerate(cuts)]
    both = concat([parts[0][:7], parts[0][7:], *parts[1:]])
    addresses = np.concatenate([part.addresses() for part in parts])
    listed = Tensor(graph, FLOAT, addresses.shape, addresses=addresses)
    np.testing.assert_array_equal(both.addresses(), addresses)
    for found, expected in zip(both.runs(), listed.runs(), strict=True):
        np.testing.assert_array_equal(found, expected)
    memory = {FLOAT: np.arange(10_000, dtype=np.float32)}
    np.testing.assert_array_equal(both.values(memory), memory[FLOAT][addresses])
    if len(np.unique(addresses)) == len(addresses):
        both.fill(memory, -1 - np.arange(len(addresses)))
        np.testing.assert_array_equal(memory[FLOAT][addresses], -1 - np.arange(len(addresses)))
        assert (memory[FLOAT] < 0).sum() == len(addresses)
    both.fill(memory, np.float32(-3))
    assert (both.values(memory) == -3).all()
    assert (memory[FLOAT] == -3).sum() == len(np.unique(addresses))


def test_concat_squeeze_and_gather():
    graph = make_graph()
    a, b = graph.add_variable(HALF, [2, 3], "a"), graph.add_variable(HALF, [2, 1], "b")
    both = concat([a, b], axis=1)
    assert both.shape == (2, 4)
    assert both.name == "'a', 'b'"
    assert both[:, 1:3].addresses().tolist() == [[1, 2], [4, 5]]
    # The last column, of b, happens to be consecutive.
    assert both.transpose().reshape(8).runs().lengths.tolist() == [1] * 6 + [2]
    assert a[[1, 0]].addresses().tolist() == [[3, 4, 5], [0, 1, 2]]
    assert b.squeeze(1).shape == (2,)
    assert b.expand_dims(1).shape == (2, 1, 1)
    assert a.slice(1, 3, axis=1).shape == (2, 2)
    assert a[..., None, 0].shape == (2, 1)
    assert concat([a]) is a


def test_view_errors():
    graph = make_graph()
    a, b = graph.add_variable(HALF, [2, 3], "a"), graph.add_variable(FLOAT, [2, 3], "b")
    with pytest.raises(IndexError, match="index 2 is out of bounds for axis 0"):
        a[2]
    with pytest.raises(IndexError, match="too many indices"):
        a[0, 0, 0]
    with pytest.raises(IndexError, match="outside dimension 1"):
        a.slice(0, 4, axis=1)
    with pytest.raises(ValueError, match="does not reshape"):
        a.reshape(4)
    with pytest.raises(ValueError, match="does not reshape"):
        a.reshape(-1, 4)
    with pytest.raises(ValueError, match="does not broadcast"):
        a.broadcast_to(4, 3)
    with pytest.raises(ValueError, match="not of size 1"):
        a.squeeze(0)
    with pytest.raises(ValueError, match="axes"):
        a.transpose(0, 0)
    with pytest.raises(TypeError, match="cast first"):
        concat([a, b])
    with pytest.raises(ValueError, match="at least one"):
        concat([])
    with pytest.raises(ValueError, match="different graphs"):
        concat([a, make_graph().add_variable(HALF, [1, 3])])


runs = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6), st.integers(0, 3)), max_size=12)


@FAST
@given(runs)
def test_union_lengths(parts):
    starts, lengths, groups = (np.array(c, np.int64) for c in zip(*parts, strict=True)) if (
        parts
    ) else (np.zeros(0, np.int64),) * 3  # fmt: skip
    expected = [
        len({a for s, n, g in parts if g == group for a in range(s, s + n)}) for group in range(4)
    ]
    assert union_lengths(starts, lengths, groups, 4).tolist() == expected


@FAST
@given(runs)
def test_later_tile_assignments_override(parts):
    painted = np.full(40, -1)
    assigned = []
    for start, length, tile in parts:
        painted[start : start + length] = tile
        assigned.append((Runs(np.array([start]), np.array([length])), np.array([tile])))
    tile_map = TileMap.from_assignments(40, assigned)
    pieces = tile_map.split(Runs(np.array([0, 3]), np.array([40, 30])))
    listed = np.repeat(pieces.tiles, pieces.lengths)
    np.testing.assert_array_equal(listed, np.concatenate([painted, painted[3:33]]))


@FAST
@given(st.data())
def test_refine_equals_elementwise(data):
    size = data.draw(st.integers(1, 20))
    sides = []
    for _ in range(2):
        cuts = sorted(data.draw(st.sets(st.integers(1, size - 1)) if size > 1 else st.just(set())))
        lengths = np.diff([0, *cuts, size])
        starts = np.array(data.draw(st.permutations(range(len(lengths))))) * 100
        sides.append(Runs(starts, lengths))
    a, b, lengths = refine(*sides)
    for start, side in ((a, sides[0]), (b, sides[1])):
        np.testing.assert_array_equal(Runs(start, lengths).addresses(), side.addresses())
