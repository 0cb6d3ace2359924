"""Random block-sparse layers with results of plain torch in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse import SparsePattern
from dynsparse.ops.linear import LayerIndex, naive

# Of the norm. What is summed is rounded once at the end; 16-bit operands are rounded before, too.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}
DTYPES = list(LIMITS)
LAYOUTS = ("contiguous", "transposed", "expanded", "strided")


def activations(batch: int, features: int, dtype: torch.dtype, layout: str) -> Tensor:
    """Make random activations [batch, features] in one of the `LAYOUTS`."""
    made = {
        "contiguous": lambda: torch.randn(batch, features),
        "transposed": lambda: torch.randn(features, batch).t(),
        "expanded": lambda: torch.randn(1, features).expand(batch, features),
        "strided": lambda: torch.randn(2 * batch, 3 * features)[::2, 1::3],
    }[layout]()
    # The conversion keeps the layout but of tensors with holes.
    return made if made.dtype is dtype else made.to(dtype)


def error(got: Tensor, wanted: Tensor) -> float:
    """Return |got - wanted| / |wanted|, or infinity if anything is NaN."""
    difference = float((got.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))
    return difference if difference == difference else float("inf")


class Case:
    """A layer of `grid` blocks of size `b`, its operands, and its results in float64.

    `values` are float32 masters unless another dtype is asked for; `without` leaves a block row and
    a block column empty.
    """

    def __init__(
        self,
        b: int,
        grid: tuple[int, int],
        batch: int,
        dtype: torch.dtype,
        density: float = 0.4,
        layout: str = "contiguous",
        values: torch.dtype = torch.float32,
        without: int | None = None,
    ) -> None:
        height, width = grid
        mask = SparsePattern.random(grid, density).to_mask()
        if without is not None:
            mask[without % height] = False
            mask[:, without % width] = False
        rows, cols = mask.nonzero().unbind(1)
        self.pattern = SparsePattern(rows, cols, shape=(height * b, width * b), block_size=b)
        self.values = torch.randn(self.pattern.values_shape).to(values)
        self.bias = torch.randn(height * b)
        self.x = activations(batch, width * b, dtype, layout)
        self.dy = activations(batch, height * b, dtype, layout)
        self.p = LayerIndex(self.pattern.index, self.values)
        self.limit = LIMITS[dtype]
        index = self.pattern.index
        x, dy, wide = self.x.double(), self.dy.double(), self.values.double()
        self.y = naive.forward(x, wide, index, self.bias.double())
        self.dx = naive.grad_input(dy, wide, index)
        self.dw = naive.grad_weight(dy, x, wide, index)
