"""Compare the products of a CPU kernel with those of dense float64 matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse.ops.linear import LayerIndex
from dynsparse.ops.linear.cpu import KERNELS
from dynsparse.pattern import SparsePattern

LOW = torch.bfloat16
LAYOUTS = [
    "contiguous",
    "transposed",
    "sliced rows",
    "sliced both",
    "expanded batch",
    "expanded features",
]


def activations(
    shape: tuple[int, int],
    layout: str,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Make random activations [batch, features] in the given memory layout."""
    batch, features = shape

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    if layout == "transposed":
        return random(features, batch).t()
    if layout == "sliced rows":
        return random(batch, features + 5)[:, 3 : features + 3]
    if layout == "sliced both":
        return random(2 * batch, 3 * features)[::2, 1::3]
    if layout == "expanded batch":
        return random(1, features).expand(batch, features)
    if layout == "expanded features":
        return random(batch, 1).expand(batch, features)
    return random(batch, features)


def shuffle_slots(pattern: SparsePattern, generator: torch.Generator) -> SparsePattern:
    """Return the same blocks with their slots in another order."""
    order = torch.randperm(pattern.nnz, generator=generator)
    return SparsePattern._from_slots(pattern.flat[order], pattern)


def dense_weight(pattern: SparsePattern, values: Tensor) -> Tensor:
    """Return the dense matrix [out, in] of `values`, in float64."""
    b = pattern.block_size
    height, width = pattern.grid
    weight = torch.zeros(height, b, width, b, dtype=torch.float64)
    weight[pattern.rows.long(), :, pattern.cols.long()] = values.double().view(-1, b, b)
    return weight.view(pattern.shape)


def check(
    kind: str,
    pattern: SparsePattern,
    x: Tensor,
    dy: Tensor,
    generator: torch.Generator,
    values_dtype: torch.dtype = torch.float32,
    p: LayerIndex | None = None,
) -> Tensor:
    """Compare all passes with random values, for every subset of needed gradients; return y.

    Args:
        p: the index to compute with; a fresh one for each call by default.
    """
    kernels = KERNELS[kind]
    values = torch.randn(pattern.values_shape, generator=generator)
    if kind == "bfloat16":  # float32 values that matrix units need not round
        values = values.to(LOW).to(values_dtype)
    bias = torch.randn(pattern.shape[0], generator=generator).to(values_dtype)
    weight = dense_weight(pattern, values)
    b = pattern.block_size
    height, width = pattern.grid
    gradient = (dy.double().t() @ x.double()).view(height, b, width, b)
    gradient = gradient[pattern.rows.long(), :, pattern.cols.long()].reshape(values.shape)
    product = x.double() @ weight.t()

    def close(got: Tensor, expected: Tensor, dtype: torch.dtype, terms: int) -> None:
        """Compare sums of `terms` products in float32, rounded to `dtype`.

        Rounding errors of a sum of normal products grow with the square root of its length.
        """
        assert got.dtype is dtype
        assert got.shape == expected.shape
        assert got.is_contiguous()
        rounding = 2.0**-8 if dtype is LOW else 1e-5
        accumulated = 2e-6 * (terms + 4) ** 0.5
        torch.testing.assert_close(got.double(), expected, rtol=rounding, atol=accumulated)

    def index() -> LayerIndex:
        return p or LayerIndex(pattern.index, values)

    close(kernels.forward(x, values, index(), None), product, x.dtype, pattern.shape[1])
    y = kernels.forward(x, values, index(), bias)
    close(y, product + bias.double(), x.dtype, pattern.shape[1])
    for need_input in (True, False):
        for need_values in (True, False):
            dbias = torch.empty(pattern.shape[0])
            dx, dvalues = kernels.backward(dy, x, values, index(), need_input, need_values, dbias)
            close(dbias, dy.double().sum(0), torch.float32, len(x))
            assert (dx is not None) == need_input
            assert (dvalues is not None) == need_values
            if dx is not None:
                close(dx, dy.double() @ weight, x.dtype, pattern.shape[0])
            if dvalues is not None:
                close(dvalues, gradient, values.dtype, len(x))
    return y
