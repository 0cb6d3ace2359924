import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dynsparse.allocation import METHODS, allocate

edges = st.sampled_from([1, 2, 4, 8, 16])


@st.composite
def architectures(draw, kernels=False):
    """Draw (shapes, block sizes): one to eight layers with shapes divisible by their blocks."""
    shapes, blocks = {}, {}
    one_block = draw(st.none() | edges)
    for i in range(draw(st.integers(1, 8))):
        b = one_block or draw(edges)
        shape = [b * draw(st.integers(1, 40)), b * draw(st.integers(1, 40))]
        if kernels:
            shape += draw(st.lists(st.integers(1, 5), max_size=2))
        shapes[f"layer{i}"], blocks[f"layer{i}"] = shape, b
    return shapes, blocks


def totals(shapes, blocks, counts):
    nnz = sum(counts[name] * blocks[name] ** 2 for name in shapes)
    return nnz, sum(math.prod(shape) for shape in shapes.values())


@given(architectures(kernels=True), st.floats(0.01, 1), st.sampled_from(sorted(METHODS)))
def test_totals_are_exact_to_the_block(architecture, density, method):
    shapes, blocks = architecture
    elements = sum(math.prod(shape) for shape in shapes.values())
    assume(density * elements >= sum(b * b for b in blocks.values()))
    counts = allocate(shapes, density, method=method, block_size=blocks)
    nnz, _ = totals(shapes, blocks, counts)
    assert abs(nnz - density * elements) <= max(b * b for b in blocks.values())
    if set(blocks.values()) == {1}:
        assert nnz == round(density * elements)
    elif len(set(blocks.values())) == 1:
        assert abs(nnz - round(density * elements)) <= max(blocks.values()) ** 2 / 2
    for name, shape in shapes.items():
        assert 1 <= counts[name] <= math.prod(shape) // blocks[name] ** 2
    assert list(counts) == list(shapes)


def evci(shapes, density, raw):
    """The published procedure in floats: make layers above density 1 dense until none is left."""
    dense: set[str] = set()
    while True:
        free = [name for name in shapes if name not in dense]
        budget = density * sum(map(math.prod, shapes.values()))
        budget -= sum(math.prod(shapes[name]) for name in dense)
        if not free:
            return dict.fromkeys(shapes, 1.0)
        scale = budget / sum(raw(shapes[name]) * math.prod(shapes[name]) for name in free)
        over = [name for name in free if scale * raw(shapes[name]) > 1]
        if not over:
            return {n: 1.0 if n in dense else scale * raw(shapes[n]) for n in shapes}
        dense.update(over)


RAW = {
    "uniform": lambda shape: 1.0,
    "er": lambda shape: (shape[0] + shape[1]) / (shape[0] * shape[1]),
    "erk": lambda shape: sum(shape) / math.prod(shape),
}


@given(architectures(kernels=True), st.floats(0.05, 1), st.sampled_from(sorted(METHODS)))
def test_densities_equal_the_published_procedure(architecture, density, method):
    shapes, _ = architecture
    expected = evci(shapes, density, RAW[method])
    # The procedure knows no least share of one block.
    assume(all(expected[name] * math.prod(shape) >= 1 for name, shape in shapes.items()))
    counts = allocate(shapes, density, method=method)
    for name, shape in shapes.items():
        assert abs(counts[name] - expected[name] * math.prod(shape)) < 1 + 1e-6
        if expected[name] == 1:
            assert counts[name] == math.prod(shape)


def test_by_hand():
    # ER shares are 200 and 110 of 11000 elements; a tenth is 1100: 1100 * 200/310 = 709.7 and
    # 1100 * 110/310 = 390.3.
    shapes = {"a": (100, 100), "b": (10, 100)}
    assert allocate(shapes, 0.1) == {"a": 710, "b": 390}
    assert allocate(shapes, 0.1, method="uniform") == {"a": 1000, "b": 100}
    # At a half the small layer would get 1952 of its 1000 elements: it is dense.
    assert allocate(shapes, 0.5) == {"a": 4500, "b": 1000}


def test_er_and_erk_differ_only_for_kernels():
    shapes = {"linear": (30, 40), "conv": (16, 8, 3, 3)}
    # 118 elements, shared as 70 : 24 * 9 by er (28.9 and 89.1), as 70 : 30 by erk (82.6 and 35.4)
    assert allocate(shapes, 0.05, method="er") == {"linear": 29, "conv": 89}
    assert allocate(shapes, 0.05, method="erk") == {"linear": 83, "conv": 35}


def test_layers_become_dense_one_after_another():
    # Raw ER densities 2/2, 20/100 and 2000/10^6. Once the smallest layer is dense the second one
    # exceeds 1 as well.
    shapes = {"tiny": (2, 1), "small": (10, 10), "large": (1000, 1000)}
    counts = allocate(shapes, 0.02)
    assert counts["tiny"] == 2
    assert counts["small"] == 100
    assert sum(counts.values()) == round(0.02 * 1_000_102)


def test_every_layer_gets_a_block():
    counts = allocate({"small": (16, 16), "large": (1600, 1600)}, 0.01, method="uniform",
                      block_size=16)  # fmt: skip
    assert counts == {"small": 1, "large": 99}


@given(architectures(), st.floats(0.1, 0.9), st.data())
def test_given_densities_are_kept_and_the_total_is_exact(architecture, density, data):
    shapes, blocks = architecture
    own = {name: data.draw(st.floats(0.01, 1)) for name in list(shapes)[1:] if len(name) % 2 == 0}
    try:
        counts = allocate(shapes, density, block_size=blocks, densities=own)
    except ValueError as error:
        assert "impossible" in str(error) or "density=None" in str(error)  # noqa: PT017
        return
    for name, value in own.items():
        blocks_of_layer = math.prod(shapes[name]) // blocks[name] ** 2
        assert counts[name] == max(1, round(value * blocks_of_layer))
    nnz, elements = totals(shapes, blocks, counts)
    assert abs(nnz - density * elements) <= max(b * b for b in blocks.values())


def test_given_densities_of_every_layer():
    shapes = {"a": (10, 10), "b": (10, 10)}
    assert allocate(shapes, None, densities={"a": 0.1, "b": 1}) == {"a": 10, "b": 100}
    assert allocate(shapes, 0.2, densities={"a": 0.1, "b": 0.3}) == {"a": 10, "b": 30}


def test_density_one_makes_everything_dense():
    assert allocate({"a": (8, 8), "b": (8, 16)}, 1, block_size=4) == {"a": 4, "b": 8}


SHAPES = {"a": (10, 10), "b": (10, 10)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"density": 0}, r"density must be a number in \(0, 1\], got 0"),
        ({"density": 1.5}, r"density must be a number in \(0, 1\], got 1.5"),
        ({"density": None}, "'a' has none"),
        ({"method": "ERK"}, r"allocation must be one of \['er', 'erk', 'uniform'\], got 'ERK'"),
        ({"shapes": {}}, "there is no layer"),
        ({"shapes": {"a": (10,)}}, r"the shape of 'a' must be \[out, in\]"),
        ({"shapes": {"a": (10, 0)}}, r"the shape of 'a' must be \[out, in\]"),
        ({"block_size": 0}, "block size of 'a' must be an integer >= 1, got 0"),
        ({"block_size": 4}, r"block size 4 does not divide the layer 'a'.*\[1, 2, 5, 10\]"),
        ({"block_size": {"c": 2}}, "block_size names 'c'.*expected one of 'a', 'b'"),
        ({"densities": {"c": 0.2}}, "densities names 'c'.*expected one of 'a', 'b'"),
        ({"densities": {"a": 0}}, r"the density of 'a' must be a number in \(0, 1\], got 0"),
        ({"densities": {"a": 0.9}}, "impossible: the layers with a density of their own take 0.45"),
        ({"density": 0.9, "densities": {"a": 0.1}}, "the others cannot exceed 1.*0.055 and 0.55"),
        ({"densities": {"a": 0.1, "b": 0.5}}, "pass density=None"),
        ({"density": 0.001, "block_size": 5}, "one block is the least.*between 0.25 and 1"),
    ],
)
def test_bad_input(arguments, message):
    arguments = {"shapes": SHAPES, "density": 0.1} | arguments
    with pytest.raises(ValueError, match=message):
        allocate(arguments.pop("shapes"), arguments.pop("density"), **arguments)
