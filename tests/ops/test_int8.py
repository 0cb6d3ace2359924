"""Products with int8 weights equal float64, on every instruction set of this machine."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_of import ISAS, with_library
from torch import Tensor

from dynsparse.ops.linear import int8
from dynsparse.ops.linear.int8 import from_kernel_order, linear_int8, to_dense, to_kernel_order
from dynsparse.pattern import SparsePattern

BLOCKS = [1, 2, 3, 4, 5, 8, 12, 16, 20, 24, 32, 64]
QUADS = [8, 16, 24, 32, 64]
LIBRARIES = [*ISAS, None]

pytestmark = pytest.mark.usefixtures("poisoned")


class Layer:
    """Random operands, and the dense float64 weight, assembled block by block."""

    def __init__(self, generator, shape, density, block, bias=True):
        pattern = SparsePattern.random(shape, density, block_size=block, generator=generator)
        values = torch.randint(-128, 128, (pattern.nnz, block, block), generator=generator)
        self.shape, self.block = shape, block
        self.scale = torch.rand(shape[0], generator=generator) + 0.01
        self.bias = torch.randn(shape[0], generator=generator) if bias else None
        self.dense = torch.zeros(shape, dtype=torch.float64)
        for row, col, part in zip(pattern.rows, pattern.cols, values, strict=True):
            across = slice(int(col) * block, (int(col) + 1) * block)
            self.dense[int(row) * block : (int(row) + 1) * block, across] = part.double()
        self.dense *= self.scale.double()[:, None]
        self.values = to_kernel_order(values.to(torch.int8).view(pattern.values_shape))
        self.row_ptr, self.cols = pattern.row_ptr, pattern.sorted_cols

    @property
    def weight(self):
        return self.values, self.scale, self.row_ptr, self.cols

    def __call__(self, x, int8_activations=False):
        return linear_int8(x, *self.weight, self.bias, self.shape[1], int8_activations)

    def expected(self, x):
        y = x.double() @ self.dense.t()
        return y if self.bias is None else y + self.bias.double()

    def check(self, y, x):
        bound = x.double().abs() @ self.dense.abs().t() + 1
        assert y.dtype == torch.float32
        assert y.shape == (*x.shape[:-1], self.shape[0])
        assert bool(((y - self.expected(x)).abs() <= 2e-6 * bound).all())


def strided(x: Tensor, layout: str) -> Tensor:
    if layout == "columns":
        return x.t().contiguous().t()
    if layout == "every second":
        wide = torch.full((2 * x.shape[0], 2 * x.shape[1]), float("nan"))
        wide[::2, ::2] = x
        return wide[::2, ::2]
    return x


def draw_layer(data, blocks):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    block = data.draw(st.sampled_from(blocks))
    grid = [data.draw(st.integers(1, max(2, 80 // block))) for _ in range(2)]
    density = data.draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    shape = tuple(block * size for size in grid)
    return generator, Layer(generator, shape, density, block, data.draw(st.booleans()))


def spaced(generator, batch, features):
    """Make samples and the multiples of their step to which they round, without ties."""
    steps = torch.randint(-127, 128, (batch, features), generator=generator)
    steps[:, -1] = 127  # the largest magnitude
    size = torch.rand(batch, 1, generator=generator, dtype=torch.float64) * 100 + 1e-3
    off = torch.rand(batch, features, generator=generator, dtype=torch.float64) * 0.8 - 0.4
    off[steps.abs() == 127] = 0
    return ((steps + off) * size).float(), steps * size


@pytest.mark.parametrize("library", LIBRARIES)
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_float_activations(library, data):
    generator, layer = draw_layer(data, BLOCKS)
    batch = data.draw(st.integers(0, 40))
    x = torch.randn(batch, layer.shape[1], generator=generator)
    x = strided(x, data.draw(st.sampled_from(["rows", "columns", "every second"])))
    y = with_library(library, lambda: layer(x), data.draw(st.sampled_from([1, 3])))
    layer.check(y, x)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("density", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("shape", [(33, 40), (7, 100), (64, 16), (5, 3)])
def test_few_samples_by_masks(library, density, shape):
    generator = torch.Generator().manual_seed(0)
    layer = Layer(generator, shape, density, 1)
    for batch in range(1, 6):
        x = torch.randn(batch, shape[1], generator=generator)
        layer.check(with_library(library, lambda x=x: layer(x), 2), x)


@pytest.mark.parametrize("library", ISAS)
def test_many_samples_by_panels(library, monkeypatch):
    made = []
    make = int8.make_row_panels
    monkeypatch.setattr(int8, "make_row_panels", lambda *args: made.append(make(*args)) or made[-1])
    generator = torch.Generator().manual_seed(0)
    layer = Layer(generator, (40, 16384), 0.05, 1)
    for batch in (256, 300):
        x = torch.randn(batch, 16384, generator=generator)
        layer.check(with_library(library, lambda x=x: layer(x), 2), x)
    assert len(made) == 1


@pytest.mark.parametrize("library", LIBRARIES)
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_int8_activations(library, data):
    generator, layer = draw_layer(data, QUADS)
    x, rounded = spaced(generator, data.draw(st.integers(0, 70)), layer.shape[1])
    x = strided(x, data.draw(st.sampled_from(["rows", "columns", "every second"])))
    threads = data.draw(st.sampled_from([1, 3]))
    layer.check(with_library(library, lambda: layer(x, int8_activations=True), threads), rounded)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("int8_activations", [False, True])
def test_product_split_over_threads(library, int8_activations):
    generator = torch.Generator().manual_seed(0)
    for block in (1, 4, 16):
        layer = Layer(generator, (64, 64), 0.5, block)
        x, rounded = spaced(generator, 70, 64)
        results = [
            with_library(library, lambda: layer(x, int8_activations), threads)  # noqa: B023
            for threads in (1, 3)
        ]
        assert torch.equal(*results)
        layer.check(results[0], rounded if int8_activations and block == 16 else x)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("weight", [-128, -127, 127])
def test_the_largest_products_do_not_saturate(library, weight):
    values = torch.full((2, 16, 16), weight, dtype=torch.int8)
    operands = torch.ones(16), torch.tensor([0, 2], dtype=torch.int32)
    cols = torch.tensor([0, 1], dtype=torch.int32)
    for sign in (-1, 1):
        x = torch.full((5, 32), 127.0 * sign)
        y = with_library(
            library,
            lambda: linear_int8(x, to_kernel_order(values), *operands, cols, None, 32, True),  # noqa: B023
        )
        assert bool((y == 32 * 127 * sign * weight).all())


@pytest.mark.parametrize("library", ISAS)
def test_samples_of_zeros_nan_and_infinity(library):
    layer = Layer(torch.Generator().manual_seed(0), (32, 32), 1.0, 8)
    x = torch.randn(6, 32)
    x[0] = 0
    x[1, 3], x[2, 31], x[3, 0] = float("nan"), float("inf"), -float("inf")
    x[4] *= 1e-38
    y = with_library(library, lambda: layer(x, int8_activations=True))
    assert torch.equal(y[0], layer.bias)
    assert bool(y[1:4].isnan().all())
    assert torch.allclose(y[4], layer.bias)
    alone = with_library(library, lambda: layer(x[5:], int8_activations=True))
    assert torch.equal(y[5:], alone)


@pytest.mark.parametrize("block", BLOCKS)
def test_kernel_layout(block):
    shape = (3,) if block == 1 else (3, block, block)
    values = torch.randint(-128, 128, shape, dtype=torch.int8)
    arranged = to_kernel_order(values)
    assert torch.equal(from_kernel_order(arranged), values)
    if block % 8 == 0:
        assert arranged.shape == (3, block // 4, block, 4)
        assert arranged[1, 1, 2, 3] == values[1, 2, 7]
    layer = Layer(torch.Generator().manual_seed(0), (4 * block, 3 * block), 0.5, block)
    assert torch.equal(to_dense(*layer.weight, layer.shape[1]), layer.dense.float())


def test_leading_dimensions_and_the_operator():
    layer = Layer(torch.Generator().manual_seed(0), (32, 16), 0.5, 8)
    x = torch.randn(2, 3, 16)
    layer.check(layer(x), x)
    layer.check(layer(x[0, 0]), x[0, 0])
    arguments = (x, *layer.weight, layer.bias, 16, False)
    torch.library.opcheck(torch.ops.dynsparse.linear_int8, arguments)
    assert torch.equal(torch.ops.dynsparse.linear_int8(*arguments), layer(x))


def test_mismatched_operands_raise():
    layer = Layer(torch.Generator().manual_seed(0), (32, 16), 0.5, 8)
    x = torch.randn(2, 16)

    def refused(match, **changed):
        names = "values", "scale", "row_ptr", "cols"
        operands = {"x": x, **dict(zip(names, layer.weight, strict=True)), "bias": layer.bias}
        with pytest.raises(RuntimeError, match=match):
            linear_int8(**operands | changed, in_features=16, int8_activations=False)

    refused("float32 activations", x=x.double())
    refused("must end in 16 features", x=x[:, :8])
    fit = "do not fit int8 weights"
    refused(fit, scale=layer.scale.bfloat16())
    refused(fit, bias=layer.bias[:8])
    refused(fit, values=layer.values.float())
    refused(fit, values=from_kernel_order(layer.values).contiguous())
    refused(fit, cols=layer.cols[:-1])
    refused(fit, cols=layer.cols.long())
    beyond = layer.cols.clone()
    beyond[0] = 2
    refused(r"cols must lie in \[0, 2\)", cols=beyond)
    refused("row_ptr must ascend", cols=layer.cols - 1)
    refused("row_ptr must ascend", row_ptr=layer.row_ptr.flip(0))
    layer(x)
    layer.row_ptr.fill_(1)  # is seen, although the tensor is the one that was checked
    with pytest.raises(RuntimeError, match="row_ptr must ascend"):
        layer(x)
