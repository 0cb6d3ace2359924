"""Copies of sparse layers: which are made to follow the original's pattern, and which should."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dynsparse._core import logs
from dynsparse.nn.sharded import is_sharded
from dynsparse.pattern import SparsePattern
from dynsparse.pattern.on_device import HostCopy

# Files that copy a model, or a layer, to use the copy while the original is trained.
_COPIERS = (
    "optim/swa_utils.py",  # averages of torch, timm, Lightning, ema-pytorch and ignite
    "utils/model_ema.py",
    "callbacks/stochastic_weight_avg.py",
    "ema_pytorch/ema_pytorch.py",
    "ema_pytorch/post_hoc_ema.py",
    "handlers/ema_handler.py",
    "ultralytics/utils/torch_utils.py",
    "mmengine/model/averaged_model.py",
    "opacus/grad_sample/functorch.py",  # computes the gradients of single samples with it
)


def is_made_to_follow() -> bool:
    """Whether the current copy is made by a class whose copies follow the original's pattern."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.endswith(_COPIERS):
        frame = frame.f_back
    return frame is not None


def note_holder(layer: Any) -> None:
    """Note that a layer holds its pattern, so that `find_holders` can find copies of the layer."""
    vars(layer._pattern).setdefault("_holders", WeakSet()).add(layer)


def find_holders(pattern: SparsePattern) -> list[Any]:
    """Return the layers that hold a pattern, or the same one with explicit slots. These include
    copies of a layer, also those that have loaded its state, until the pattern of one changes."""
    holders = vars(pattern).get("_holders")
    return [layer for layer in holders or () if vars(layer._pattern).get("_holders") is holders]


class Snapshot:
    """Some values of a copy, to find out whether they were written to since.

    Comparing them finds what was written through `.data`, too, whose version does not change.

    Attributes:
        parameter: identity and shape of the values.
        is_trained: whether it has noticed a gradient.
    """

    def __init__(self, values: Tensor, sees_gradients: bool = False) -> None:
        self._version = None if values.is_inference() else values._version
        is_read = not (is_sharded(values) or values.is_meta)
        self._first = values.detach().flatten()[:64].clone() if is_read else None
        self._differs: HostCopy | None = None
        self.parameter = id(values), values.shape
        self.is_trained = False
        self._hook: RemovableHandle | None = None
        if sees_gradients:
            self._hook = values.register_post_accumulate_grad_hook(self._note_gradient)

    @property
    def sees_gradients(self) -> bool:
        """Whether it notices gradients of the values, or has noticed one."""
        return self.is_trained or self._hook is not None

    def _note_gradient(self, _: Tensor) -> None:
        self.is_trained = True
        self.stop()

    def stop(self) -> None:
        """Stop noticing gradients."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def is_written(self, values: Tensor) -> bool:
        """Whether the values have changed since; for a device, as far as the host knows by now."""
        now, before = Snapshot(values), self._first
        if now._version != self._version:
            return True
        if now._first is None or before is None:
            return False
        if (now._first.dtype, now._first.device) != (before.dtype, before.device):
            return False
        if values.is_cpu:
            return not torch.equal(now._first, before)
        return self._differs_by_now(now._first, before)

    def _differs_by_now(self, now: Tensor, before: Tensor) -> bool:
        """Compare tensors without waiting: the result is that of an earlier call."""
        last, self._differs = self._differs, HostCopy((now != before).any())
        return last is not None and last.is_ready and bool(last.get()[0])


def check_copy(other: Any) -> bool:
    """Warn if a copy is written to but not trained, like an average of the weights or a target
    network. Called before a change of the original's pattern, which the copy does not follow.

    Returns whether to check it again.
    """
    values, before = other._parameters.get("values"), other._values_as_copied
    if not isinstance(values, Tensor):
        return False
    if (
        before is None
        or before.parameter != (id(values), values.shape)
        or (values.requires_grad and not before.sees_gradients)
    ):  # from now on
        watched = values.requires_grad and values.is_leaf and not is_sharded(values)
        other._replace_snapshot(Snapshot(values, sees_gradients=watched))
        return watched or not values.requires_grad
    if before.is_trained or values.grad is not None:
        return False
    if not before.is_written(values):
        return True
    other._replace_snapshot(None)
    logs.warn(
        "a copy of a sparse model is written to but not trained, like an average of its weights "
        "(EMA) or a target network, and keeps its pattern while that of the model changes, so its "
        "values belong to other weights: call dynsparse.nn.follow_patterns(copy, model) when the "
        "copy is made"
    )
    return False


def warn_of_shared_memory(values: Tensor) -> None:
    """Warn if a change of the pattern takes values out of memory that processes share."""
    if values.is_cpu and not is_sharded(values) and values.is_shared():
        logs.warn(
            "the values of a sparse layer are in memory that processes share, as after "
            "share_memory(): a change of the pattern gives them new memory in this process, and "
            "the others keep the old values and the old pattern"
        )
