"""A layer whose forward pass uses only some of its weights, while all of them learn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynsparse.ops.eager import refuse_transforms
from dynsparse.ops.linear import LayerIndex, operator
from dynsparse.ops.linear.layer_index import register_index
from dynsparse.pattern import PatternIndex, SparsePattern
from dynsparse.typed import typed


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
        self.pattern = SparsePattern._by_slots(pattern.flat[slots], pattern)
        self._hold(slots.to(device))

    @classmethod
    def _on_device(cls, pattern: SparsePattern, slots: Tensor) -> ActiveSet:
        """Slots that a device has chosen, sorted and distinct by the way they were made; nothing
        waits for it."""
        made = cls.__new__(cls)
        flat = pattern._flat_on(slots.device).index_select(0, slots)
        if len(pattern._slots_on(slots.device)):
            flat, order = flat.sort()
            slots = slots.index_select(0, order)
        made.pattern = SparsePattern._on_device(flat, pattern)
        made._hold(slots)
        return made

    def _hold(self, slots: Tensor) -> None:
        self.slots = slots
        self._index = self.pattern._index_on(slots.device)
        # Off the CPU what kernels make of the index is kept; calls find it by these tensors.
        like = torch.empty((), device=slots.device).expand(self.pattern.values_shape)
        own = LayerIndex(self._index, like)
        self._own = None if own.on_cpu else own
        if self._own is not None:
            register_index(self._own)

    def __getstate__(self) -> dict[str, Any]:
        return {"pattern": self.pattern, "slots": self.slots}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.pattern = state["pattern"]
        self._hold(state["slots"])

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

    def may_take(self, other: ActiveSet) -> bool:
        """Whether another choice may be written over this one; what takes memory is made now."""
        if self._own is None or other._own is None or not self._own.may_take(other._own):
            return False
        other._own.derive_like(self._own)
        return True

    def take(self, other: ActiveSet) -> None:
        """Become another choice, in the same memory: CUDA graphs that read it stay valid."""
        assert self._own is not None
        assert other._own is not None
        torch._foreach_copy_([self.slots], [other.slots])
        self._own = self._own.take(other._own)
        register_index(self._own)
        self.pattern = other.pattern

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
        # The slots only so that autograd notices where others are written over them.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, values, chosen, slots)
        ctx.active, ctx.index, ctx.layer, ctx.shape = active, index, layer, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        return layer.forward_with(x, chosen, active, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        try:
            x, values, chosen, _ = ctx.saved_tensors
        except RuntimeError as error:
            raise operator.explained(error) from None
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = ctx.layer.grad_input_with(dy, ctx.shape, chosen, ctx.active)
        if ctx.needs_input_grad[1]:
            dw = ctx.layer.grad_weight_with(dy, x, values, ctx.index)
        if ctx.needs_input_grad[2]:
            db = ctx.layer.grad_bias_with(dy, ctx.bias_dtype)
        return dx, dw, db, None, None, None, None
