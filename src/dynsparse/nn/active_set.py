"""A layer whose forward pass uses a subset of its weights while all of them are trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dynsparse._core import logs
from dynsparse._core.checks import check_types
from dynsparse.ops.linear import LayerIndex, cuda
from dynsparse.ops.linear.autograd import autocast_values, explain_error
from dynsparse.ops.linear.layer_index import register_index
from dynsparse.ops.torch_internals import refuse_transforms
from dynsparse.pattern import PatternIndex, SparsePattern


class ActiveSet:
    """The slots of a layer that its forward pass uses.

    Y = X A^T + b and dX = dY A use the active weights only; dW = dY^T X is computed for all slots
    of the layer.

    Source: Jayakumar et al. 2020, "Top-KAST: Top-K Always Sparse Training", section 2: the layer's
    pattern is the set B, the active slots are the set A.

    Args:
        pattern: the pattern of the layer.
        slots: the active slots: int64 [any], sorted and distinct.
        device: the device of the layer's values.

    Raises:
        ValueError: slots outside the pattern, not sorted or not distinct.
    """

    @check_types
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
        self.pattern = SparsePattern._from_slots(pattern.flat[slots], pattern)
        self._set_slots(slots.to(device))

    @classmethod
    def _from_device(cls, pattern: SparsePattern, slots: Tensor) -> ActiveSet:
        """Make the set from slots on a device, sorted and distinct, without a synchronisation."""
        active = cls.__new__(cls)
        flat = pattern._flat_on(slots.device).index_select(0, slots)
        if len(pattern._slots_on(slots.device)):
            flat, order = flat.sort()
            slots = slots.index_select(0, order)
        active.pattern = SparsePattern._from_device(flat, pattern)
        active._set_slots(slots)
        return active

    def _set_slots(self, slots: Tensor) -> None:
        self.slots = slots
        self._index = self.pattern._shared_on(slots.device)
        # On other devices, kernels cache what they derive from the index by these tensors.
        like = torch.empty((), device=slots.device).expand(self.pattern.values_shape)
        index = LayerIndex(self._index, like)
        self._cached = None if index.on_cpu else index
        if self._cached is not None:
            cuda.derive(self._cached)
            register_index(self._cached)

    def __getstate__(self) -> dict[str, Any]:
        return {"pattern": self.pattern, "slots": self.slots}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.pattern = state["pattern"]
        self._set_slots(state["slots"])

    target = None

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        """Return the layer's output [..., out] for x [..., in], computed with the active slots."""
        return self.product(layer, x, layer.bias)

    def product(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the forward pass with another bias, or without one if it is None."""
        refuse_transforms("a layer with an active subset", x, layer.values)
        device, values = x.device.type, layer.values
        if torch.is_autocast_enabled(device) and x.is_floating_point():
            x = x.to(torch.get_autocast_dtype(device))
            values = autocast_values(values, device)
        with torch.autocast(device, enabled=False):
            return _ActiveLinear.apply(x, values, bias, self.slots, self._index, layer.index, layer)

    def can_copy_from(self, other: ActiveSet) -> bool:
        """Whether `copy_from` can copy `other` into this set; allocates what that needs."""
        if (
            self._cached is None
            or other._cached is None
            or not self._cached.can_copy_from(other._cached)
        ):
            return False
        other._cached.derive_like(self._cached)
        return True

    def copy_from(self, other: ActiveSet) -> None:
        """Copy `other` into this set in place, so that CUDA graphs that read it stay valid."""
        assert self._cached is not None
        assert other._cached is not None
        torch._foreach_copy_([self.slots], [other.slots])
        self._cached = self._cached.copy_from(other._cached)
        register_index(self._cached)
        self.pattern = other.pattern

    def kernel(self, batch: int, backward: bool) -> str:
        return "active subset"

    def for_pattern(self, pattern: SparsePattern) -> None:
        """Return None: a change of the pattern resets the active set."""


def warn_of_active_sets(model: nn.Module) -> None:
    """Warn that the outputs will differ if weights are stored without their active set."""
    for name, module in model.named_modules():
        if getattr(module, "active", None) is not None:
            logs.warn(
                f"layer {name!r} computes with a part of its weights, chosen by Top-KAST, and what "
                "is stored uses all of them: call the trainer's shrink() first to keep the outputs"
            )
            return


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
        selected = values[slots]
        # The slots are saved so that autograd detects writes to them.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, values, selected, slots)
        ctx.active, ctx.index, ctx.layer, ctx.shape = active, index, layer, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        return layer.forward_with(x, selected, active, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        try:
            x, values, selected, _ = ctx.saved_tensors
        except RuntimeError as error:
            raise explain_error(error) from None
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = ctx.layer.grad_input_with(dy, ctx.shape, selected, ctx.active)
        if ctx.needs_input_grad[1]:
            dw = ctx.layer.grad_weight_with(dy, x, values, ctx.index)
        if ctx.needs_input_grad[2]:
            db = ctx.layer.grad_bias_with(dy, ctx.bias_dtype)
        return dx, dw, db, None, None, None, None
