"""A layer whose forward pass uses only some of its weights, while all of them learn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynsparse.ops.eager import refuse_transforms
from dynsparse.pattern import PatternIndex, SparsePattern
from dynsparse.typed import typed

__all__ = ["ActiveSet"]


class ActiveSet:
    """The slots of a layer that its forward pass uses.

    Y = X A^T + b and dX = dY A take the active weights alone; dW = dY^T X is computed at all
    positions of the layer, as if they had all been used.

    Source: Jayakumar et al. 2020, "Top-KAST: Top-K Always Sparse Training", section 2: the layer's
    pattern is the set B, the active slots are the set A.

    Args:
        pattern: of the layer.
        slots: the active ones: int64 [any], sorted and distinct.
        device: where the layer's values are.

    Raises:
        ValueError: slots outside the pattern, not sorted or not distinct.
    """

    @typed
    def __init__(self, pattern: SparsePattern, slots: Tensor, device: torch.device) -> None:
        if slots.dtype != torch.int64 or slots.dim() != 1 or slots.is_meta:
            raise ValueError(
                f"active slots must be int64 [any], got {slots.dtype} {list(slots.shape)} "
                f"on {slots.device}"
            )
        slots = slots.cpu()
        ends = slots[[0, -1]].tolist() if len(slots) else [0, 0]
        if (
            not bool((slots[1:] > slots[:-1]).all())
            or ends[0] < 0
            or ends[1] >= max(pattern.nnz, 1)
        ):
            raise ValueError(f"active slots must be sorted, distinct and within [0, {pattern.nnz})")
        self.pattern = SparsePattern.from_flat(
            pattern.flat[slots], shape=pattern.shape, block_size=pattern.block_size
        )
        self.slots = slots.to(device)
        self._index = self.pattern._index_on(device)

    target = None

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], with the layer's values, index and bias."""
        return self.product(layer, x, layer.bias)

    def product(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """The same with another bias, or none."""
        refuse_transforms("a layer with an active subset", x, layer.values)
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.is_floating_point():
            x = x.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return _ActiveLinear.apply(
                x, layer.values, bias, self.slots, self._index, layer.index, layer
            )

    def kernel(self, batch: int, backward: bool) -> str:
        return "active subset"

    def after(self, pattern: SparsePattern) -> None:
        """A change of the pattern takes the choice of slots away."""


class _ActiveLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        bias: Tensor | None,
        slots: Tensor,
        active: PatternIndex,
        index: PatternIndex,
        layer: Any,
    ) -> Tensor:
        chosen = values[slots]
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, values, chosen)
        ctx.active, ctx.index, ctx.layer, ctx.shape = active, index, layer, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        return layer.forward_with(x, chosen, active, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, values, chosen = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = ctx.layer.grad_input_with(dy, ctx.shape, chosen, ctx.active)
        if ctx.needs_input_grad[1]:
            dw = ctx.layer.grad_weight_with(dy, x, values, ctx.index)
        if ctx.needs_input_grad[2]:
            db = ctx.layer.grad_bias_with(dy, ctx.bias_dtype)
        return dx, dw, db, None, None, None, None
