"""Random layers: operands of the kernels, and their dense counterparts."""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse import SparsePattern
from dynsparse.ops.linear import LayerIndex
from dynsparse.ops.linear.cost_table import Layer
from dynsparse.ops.linear.cuda import dense


class Data:
    """One layer and its activations, on the device.

    Attributes:
        values: [nnz, b, b] or [nnz]; x: [batch, n]; dy: [batch, out].
        weight: [out, n], dense, or None.
    """

    def __init__(
        self,
        device: torch.device,
        n: int,
        batch: int,
        density: float,
        b: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        weight: bool = False,
        out: int | None = None,
        shuffled: bool = False,
    ) -> None:
        out = n if out is None else out
        generator = torch.Generator().manual_seed(n + b)
        random = SparsePattern.random((out, n), density, block_size=b, generator=generator)
        self.pattern = random._to_explicit_slots()  # as a trainer makes it
        if shuffled:
            order = torch.randperm(random.nnz, generator=generator)
            self.pattern = SparsePattern._from_slots(random.flat[order], random)
        self.device, self.b, self.batch, self.density, self.n = device, b, batch, density, n
        self.values = self._random(*self.pattern.values_shape, dtype=dtype)
        index = type(self.pattern.index)(*(t.to(device) for t in self.pattern.index))
        self.p = LayerIndex(index, self.values)
        self.x = self._random(batch, n, dtype=dtype)
        self.dy = self._random(batch, out, dtype=dtype)
        self.bias = self._random(out, dtype=dtype)
        self.weight = self.dense(self.values) if weight else None

    def _random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    @property
    def layer(self) -> Layer:
        p = self.p
        return Layer(p.out_features, p.in_features, p.nnz, p.block_size)

    def dense(self, values: Tensor) -> Tensor:
        """[out, in], computed without the kernels."""
        b, (height, width) = self.b, self.pattern.grid
        rows, cols = (t.long().to(self.device) for t in (self.pattern.rows, self.pattern.cols))
        weight = values.new_zeros(height, width, b, b)
        weight[rows, cols] = values.view(-1, b, b)
        return weight.transpose(1, 2).reshape(height * b, width * b)

    def collected(self, gradient: Tensor) -> Tensor:
        """The entries of a dense gradient [out, in] at the pattern, in the layout of `values`."""
        b, (height, width) = self.b, self.pattern.grid
        rows, cols = (t.long().to(self.device) for t in (self.pattern.rows, self.pattern.cols))
        blocks = gradient.view(height, b, width, b).transpose(1, 2)[rows, cols]
        return blocks.reshape(self.values.shape)


def kept_weight(d: Data) -> Tensor | None:
    """The dense weight that the forward pass of `dense` keeps for backward."""
    kept: list[Tensor] = []
    dense.forward(d.x, d.values, d.p, d.bias, kept)
    return kept[0] if kept else None


def error(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / |wanted|; infinite if anything is NaN."""
    wanted = wanted.double()
    found = float((got.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))
    return found if found == found else float("inf")
