"""Which layer values belong to: those of another layer are used only with its pattern."""

from __future__ import annotations

import weakref
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from dynsparse.nn.sharded import is_sharded
from dynsparse.ops import capture
from dynsparse.ops.torch_internals import unwrap
from dynsparse.pattern import SparsePattern

# The layer that each Parameter of values belongs to.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()

_OTHER_VALUES = (
    "this layer was given the values of another sparse layer, whose pattern differs: pass rows and "
    "cols with them, as in the other layer's state_dict()"
)


def set_owner(layer: Any) -> None:
    """Note that the Parameter that a layer holds is its own."""
    _owners[layer.values] = weakref.ref(layer)


def drop_references(values: Tensor) -> None:
    """Drop the weak references to a layer's Parameter: torch swaps no tensor that has one."""
    _owners.pop(values, None)
    capture.forget_replaced(values)


def check_owner(layer: Any) -> None:
    """Raise RuntimeError if the Parameter that a layer holds is that of a layer with another
    pattern. Without an owner it becomes the layer's."""
    owner = _owners.get(layer.values, weakref.ref(layer))()
    if owner is None or owner is layer:
        set_owner(layer)
    elif not owner._pattern._has_slots_of(layer._pattern):
        raise RuntimeError(_OTHER_VALUES)


def check_given(layer: Any, values: Tensor) -> None:
    """Raise RuntimeError if values that are not a Parameter, as in a transform of torch.func or
    detached, are those of layers with other patterns."""
    given = unwrap(values)
    if given.dim() > values.dim():
        _check_stacked(layer, given, values.shape)
    elif layer._substitutes is None and type(given) in (Tensor, Parameter):
        _check_memory(layer, given)


# Patterns that were stored or loaded, by their sizes and first columns.
_patterns: WeakValueDictionary[tuple[Any, ...], SparsePattern] = WeakValueDictionary()


def find_equal_pattern(pattern: SparsePattern) -> SparsePattern:
    """Return the equal pattern that was passed here before, if it exists, otherwise this one. So a
    layer that loads the state of another holds the same object (see `copies.find_holders`)."""
    first = pattern.cols.numpy()[:256].tobytes()
    key = pattern.shape, pattern.block_size, pattern.nnz, first
    known = _patterns.get(key)
    if known is not None and known._has_slots_of(pattern):
        return known
    _patterns[key] = pattern
    return pattern


def _check_memory(layer: Any, given: Tensor) -> None:
    """Refuse values in the memory of another layer's values, if its pattern differs."""
    address = given.data_ptr()
    state = layer._state
    # No address: empty, or on the meta device. That of the layer's own values: the usual case.
    if not address or (state is not None and state.address == address):
        return
    # Each step of `_owners.values()` takes ten times as long.
    for owner in [reference() for reference in list(_owners.data.values())]:
        state = None if owner is None else owner._state
        if state is None or state.address != address:
            continue
        own = unwrap(owner.values)  # whose memory may be another since
        is_same = own.data_ptr() == address and own.shape == given.shape
        if is_same and not owner._pattern._has_slots_of(layer._pattern):
            raise RuntimeError(_OTHER_VALUES)


def _check_stacked(layer: Any, stacked: Tensor, shape: torch.Size) -> None:
    """Refuse values that were stacked, as `torch.func.stack_module_state` does it, with those of
    layers with other patterns: stacks have no patterns.

    Layers are found by their values, so the check ends where these have been trained on.
    """
    if not stacked.numel() or stacked.is_meta:
        return
    rows = stacked.detach().reshape(-1, shape.numel())
    for values, reference in list(_owners.items()):
        owner = reference()
        if (
            owner is None
            or values.shape != shape
            or values.device != rows.device
            or is_sharded(values)
            or owner._pattern._has_slots_of(layer._pattern)
        ):
            continue
        flat = values.detach().flatten()
        first = (rows[:, :1] == flat[:1]).any()
        if bool(first) and bool((rows == flat).all(1).any()) and bool((flat != flat[0]).any()):
            raise RuntimeError(
                "values of sparse layers with different patterns were stacked, and all would be "
                "computed with the pattern of one: call the models one after the other, or give "
                "them one pattern before stack_module_state"
            )
