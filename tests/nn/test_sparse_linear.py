import copy

import pytest
import torch
from torch import nn

from dynsparse.nn import SparseEmbedding, SparseLinear
from dynsparse.ops.linear import linear
from dynsparse.pattern import Rewiring, SparsePattern


def same_layer(a, b):
    return (
        a.pattern == b.pattern and torch.equal(a.values, b.values) and torch.equal(a.bias, b.bias)
    )


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3, 4)])
def test_is_a_drop_in_for_linear(block_size, lead):
    layer = SparseLinear(16, 8, 0.3, block_size)
    dense = nn.Linear(16, 8)
    with torch.no_grad():
        dense.weight.copy_(layer.to_dense())
        dense.bias.copy_(layer.bias)
    x = torch.randn(*lead, 16)
    torch.testing.assert_close(layer(x), dense(x))
    assert layer.density == layer.pattern.density
    assert layer.values.shape == layer.pattern.values_shape


def test_without_bias_and_with_dtypes():
    layer = SparseLinear(8, 8, 0.5, bias=False, dtype=torch.float64)
    assert layer.bias is None
    assert layer(torch.zeros(2, 8, dtype=torch.float64)).dtype == torch.float64
    assert layer.to(torch.bfloat16)(torch.zeros(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_initial_values_follow_the_fan_in_of_each_row():
    # row 0 has 400 connections, row 1 has 4
    rows = [0] * 400 + [1] * 4
    cols = [*range(400), *range(4)]
    bounds = torch.zeros(2)
    for _ in range(200):
        layer = SparseLinear(400, 3, pattern=SparsePattern(rows, cols, shape=(3, 400)))
        values = layer.values.detach().abs()
        bounds = torch.maximum(bounds, torch.stack([values[:400].max(), values[400:].max()]))
        assert layer.bias[2].abs() <= 1 / 20
    assert 0.049 < bounds[0] <= 1 / 20
    assert 0.49 < bounds[1] <= 1 / 2


def test_generator_determines_everything():
    a, b = (SparseLinear(16, 8, 0.3, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert same_layer(a, b)


def test_from_dense_keeps_the_largest_blocks():
    dense = nn.Linear(4, 4)
    with torch.no_grad():
        dense.weight.zero_()
        dense.weight[0:2, 2:4] = torch.tensor([[0.0, -9], [0, 0]])  # sum 9
        dense.weight[2:4, 0:2] = torch.tensor([[4.0, 4], [-4, 4]])  # sum 16
        dense.weight[2:4, 2:4] = torch.tensor([[8.0, 0], [0, 0]])  # sum 8
    layer = SparseLinear.from_dense(dense, density=0.5, block_size=2)
    assert layer.pattern.flat.tolist() == [1, 2]
    assert torch.equal(layer.values[0], torch.tensor([[0.0, -9], [0, 0]]))
    assert torch.equal(layer.bias, dense.bias)
    x = torch.randn(3, 4)
    full = SparseLinear.from_dense(dense, density=1.0)
    torch.testing.assert_close(full(x), dense(x))
    assert torch.equal(full.to_dense(), dense.weight)


def test_from_dense_breaks_ties_by_position():
    dense = nn.Linear(4, 2, bias=False)
    nn.init.ones_(dense.weight)
    layer = SparseLinear.from_dense(dense, density=0.5)
    assert layer.pattern.flat.tolist() == [0, 1, 2, 3]
    assert layer.bias is None


def test_from_dense_rejects_nan():
    dense = nn.Linear(4, 4)
    with torch.no_grad():
        dense.weight[1, 2] = float("nan")
    with pytest.raises(ValueError, match="weights contain NaN"):
        SparseLinear.from_dense(dense, 0.5)


def test_rewire_moves_values_in_place():
    layer = SparseLinear(4, 3, pattern=SparsePattern([0, 0, 1, 2], [1, 3, 0, 1], shape=(3, 4)))
    parameter = layer.values
    old = parameter.detach().clone()
    layer.rewire(Rewiring.make(layer.pattern, torch.tensor([1, 3]), torch.tensor([0, 8])))
    assert layer.values is parameter
    assert layer.pattern.flat.tolist() == [1, 0, 4, 8]
    assert layer.values.tolist() == [old[0], 0, old[2], 0]
    x = torch.randn(5, 4)
    torch.testing.assert_close(layer(x), x @ layer.to_dense().t() + layer.bias)


def test_set_pattern_with_and_without_values():
    layer = SparseLinear(8, 8, 0.25)
    kept = layer.to_dense().detach()
    other = SparsePattern.random((8, 8), nnz=layer.pattern.nnz)
    layer.set_pattern(other)
    assert torch.equal(layer.to_dense(), kept * other.to_mask())
    values = torch.randn(other.values_shape)
    layer.set_pattern(SparsePattern.random((8, 8), nnz=other.nnz), values)
    assert torch.equal(layer.values, values)


def test_graph_from_before_a_rewiring_keeps_its_pattern():
    layer = SparseLinear(4, 4, 0.5)
    frozen = layer.values.detach().clone().requires_grad_()
    x = torch.randn(3, 4, requires_grad=True)
    y = linear(x, frozen, layer.index)
    dense = layer.to_dense().detach()
    layer.set_pattern(SparsePattern.random((4, 4), 0.5))
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3, 4) @ dense)


@pytest.mark.parametrize("block_size", [1, 4])
def test_state_dict_contains_the_pattern(block_size):
    a, b = SparseLinear(16, 8, 0.5, block_size), SparseLinear(16, 8, 0.5, block_size)
    assert a.pattern != b.pattern
    assert sorted(a.state_dict()) == ["bias", "cols", "rows", "values"]
    parameter = b.values
    b.load_state_dict(a.state_dict())
    assert same_layer(a, b)
    assert b.values is parameter
    x = torch.randn(3, 16)
    assert torch.equal(a(x), b(x))
    c = SparseLinear(16, 8, 0.5, block_size)
    c.load_state_dict(a.state_dict(), assign=True)
    assert same_layer(a, c)
    assert torch.equal(a(x), c(x))


def test_mismatched_state_changes_nothing():
    layer = SparseLinear(16, 8, 0.5)
    before = copy.deepcopy(layer)
    states = {
        "same shape, block size and number": SparseLinear(16, 8, 0.25).state_dict(),
        "rows must lie in": SparseLinear(8, 16, 0.5).state_dict(),
        "duplicate": {**layer.state_dict(), "rows": layer.rows * 0, "cols": layer.cols * 0},
        "must be integers": {**layer.state_dict(), "rows": layer.rows.float()},
        "size mismatch for values": {**layer.state_dict(), "values": torch.zeros(3)},
    }
    for message, state in states.items():
        with pytest.raises(RuntimeError, match=message):
            layer.load_state_dict(state)
        assert layer.pattern == before.pattern
        assert torch.equal(layer.values, before.values)
    with pytest.raises(RuntimeError, match="values without rows and cols"):
        layer.load_state_dict({"values": layer.values, "bias": layer.bias})


def test_state_with_slots_in_any_order():
    layer = SparseLinear(16, 8, 0.5)
    flipped = {name: layer.state_dict()[name].flip(0) for name in ("rows", "cols", "values")}
    other = SparseLinear(16, 8, 0.5)
    other.load_state_dict({**layer.state_dict(), **flipped})
    assert torch.equal(other.values, layer.values.flip(0))
    assert torch.equal(other.rows, layer.rows.flip(0))
    assert torch.equal(other.to_dense(), layer.to_dense())
    x = torch.randn(3, 16)
    torch.testing.assert_close(other(x), layer(x))


def test_description():
    text = repr(SparseLinear(16, 8, 0.25, block_size=4))
    assert "in_features=16, out_features=8, density=0.25, nnz=2, block_size=4, bias=True" in text


@pytest.mark.slow
def test_compiles_whole_and_updates_do_not_recompile():
    model = nn.Sequential(SparseLinear(24, 32, 0.2), nn.ReLU(), SparseLinear(32, 8, 0.5, 4))
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(7, 24, requires_grad=True)

    def check():
        model.zero_grad()
        compiled(x).square().sum().backward()
        got = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).square().sum().backward()
        for a, p in zip(got, model.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad)

    check()
    layer = model[0]
    layer.set_pattern(SparsePattern.random(layer.pattern.shape, nnz=layer.pattern.nnz))
    with torch.compiler.set_stance("fail_on_recompile"):
        check()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: SparseLinear(8, 8, 0.0), ValueError, r"density must be a number in \(0, 1\]"),
        (lambda: SparseLinear(8, 8, 1.1), ValueError, "got 1.1"),
        (lambda: SparseLinear(8, 6, 0.5, 4), ValueError, "block_size 4 does not divide"),
        (lambda: SparseLinear(8, 8, dtype=torch.int32), TypeError, "floating point"),
        (
            lambda: SparseLinear(8, 4, pattern=SparsePattern.full((8, 4))),
            ValueError,
            r"shape \(4, 8\)",
        ),
        (
            lambda: SparseLinear(8, 8, block_size=4, pattern=SparsePattern.full((8, 8))),
            ValueError,
            "leave block_size out",
        ),
        (
            lambda: SparseLinear(8, 8, 0.5).set_pattern(SparsePattern.full((8, 8))),
            ValueError,
            "same shape, block size and number of blocks",
        ),
        (
            lambda: SparseLinear(2, 2, 1.0).set_pattern(SparsePattern.full((2, 2)), torch.ones(3)),
            ValueError,
            "values must have the shape",
        ),
        (
            lambda: SparseLinear.from_dense(nn.Linear(4, 4), density=2),
            ValueError,
            "density must be",
        ),
        (
            lambda: SparseLinear.from_dense(nn.Linear(4, 4), 0.5, block_size=3),
            ValueError,
            "does not divide",
        ),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "make",
    [
        lambda **given: SparseLinear(12, 8, **given),
        lambda **given: SparseEmbedding(8, 12, **given),
    ],
)
def test_pattern_and_density_together_raise(make):
    pattern = SparsePattern.random(make().pattern.shape, nnz=5)
    assert make(pattern=pattern).pattern == pattern
    with pytest.raises(ValueError, match="leave density out"):
        make(pattern=pattern, density=0.3)
