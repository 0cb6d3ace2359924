"""How one pattern turns into the next: what is kept, what left, what was grown."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dynsparse.encoding import follow_, merge
from dynsparse.pattern.coordinates import INT32_MAX
from dynsparse.pattern.sparse_pattern import SparsePattern

__all__ = ["Rewiring"]


@dataclass(frozen=True)
class Rewiring:
    """One pattern update: the pattern before, the pattern after, and where each new slot is from.

    `source` is int32 [after.nnz]: the old slot a new slot comes from, or -1 for a grown one.
    """

    before: SparsePattern
    after: SparsePattern
    source: Tensor

    @classmethod
    def make(cls, pattern: SparsePattern, drop: Tensor, grow: Tensor) -> Rewiring:
        """Drop slots and grow positions.

        Args:
            pattern: the pattern before.
            drop: the slots that leave, int64 [any], distinct, in any order.
            grow: the flat block positions that join, int64 [any], distinct, in any order. A
                position may join only if it is free once `drop` has left.

        Raises:
            ValueError: a slot or position out of range or named twice, or a position that is taken.
        """
        drop = torch.as_tensor(drop, dtype=torch.int64).cpu().flatten()
        grow = torch.as_tensor(grow, dtype=torch.int64).cpu().flatten()
        merged = merge(pattern.row_ptr, pattern.rows, pattern.cols, pattern.grid[1], drop, grow)
        if len(merged.cols) > INT32_MAX:
            raise ValueError(f"at most {INT32_MAX} blocks fit a pattern, got {len(merged.cols)}")
        after = SparsePattern.__new__(SparsePattern)
        after.shape, after.block_size = pattern.shape, pattern.block_size
        after.row_ptr, after.rows, after.cols = merged.row_ptr, merged.rows, merged.cols
        return cls(pattern, after, merged.source)

    @classmethod
    def between(cls, before: SparsePattern, after: SparsePattern) -> Rewiring:
        """The rewiring that leads from one pattern to another of the same shape and block size."""
        if (before.shape, before.block_size) != (after.shape, after.block_size):
            raise ValueError(f"{before} and {after} differ in shape or block size")
        positions = after.flat
        stays = before.contains(positions)
        source = torch.full((after.nnz,), -1, dtype=torch.int32)
        source[stays] = torch.searchsorted(before.flat, positions[stays], out_int32=True)
        return cls(before, after, source)

    @property
    def keeps_size(self) -> bool:
        """Whether as many blocks are there after as before."""
        return self.after.nnz == self.before.nnz

    @property
    def grown(self) -> Tensor:
        """The new slots that were grown, int64."""
        return (self.source < 0).nonzero().flatten()

    @property
    def dropped(self) -> Tensor:
        """The old slots that left, int64."""
        leaves = torch.ones(self.before.nnz, dtype=torch.bool)
        leaves[self.source[self.source >= 0].long()] = False
        return leaves.nonzero().flatten()

    def apply(self, tensor: Tensor, fill: float | Tensor = 0.0) -> Tensor:
        """`tensor` ([before.nnz, ...]) in the order of the new slots: a new tensor.

        Survivors keep their entries; grown slots get `fill`, a number or a tensor
        [grown, ...] in slot order.
        """
        self._check_leading(tensor)
        source = self.source.to(tensor.device)
        if self.before.nnz:
            out = tensor.index_select(0, source.clamp(min=0))
        else:
            out = tensor.new_empty((self.after.nnz, *tensor.shape[1:]))
        out[source < 0] = fill.to(out) if isinstance(fill, Tensor) else fill
        return out

    def apply_(self, *tensors: Tensor, fill: float | Tensor = 0.0) -> None:
        """What `apply` does, in place: `tensors` keep their memory and need no more of it.

        Only for rewirings that keep the number of blocks.
        """
        for tensor in tensors:
            self._check_leading(tensor)
        if not self.keeps_size:
            raise ValueError(
                f"{self.before.nnz} blocks become {self.after.nnz}, which tensors cannot follow in "
                "place: use apply()"
            )
        follow_(tensors, self.source)
        if isinstance(fill, Tensor) or fill != 0:
            for tensor in tensors:
                grown = self.grown.to(tensor.device)
                tensor[grown] = fill.to(tensor) if isinstance(fill, Tensor) else fill

    def _check_leading(self, tensor: Tensor) -> None:
        if tensor.dim() == 0 or len(tensor) != self.before.nnz:
            raise ValueError(
                f"expected a tensor with {self.before.nnz} leading entries, "
                f"got the shape {list(tensor.shape)}"
            )
