"""Copies of sparse layers: which are made to follow the original's pattern, and which should."""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch import Tensor

from dynsparse._core import logs
from dynsparse.nn.sharded import is_sharded
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


class Snapshot:
    """Some values of a copy as it was made, to find out whether they were written to.

    Comparing them finds what was written through `.data`, too, whose version does not change.
    """

    def __init__(self, values: Tensor) -> None:
        self._version = None if values.is_inference() else values._version
        is_read = not (is_sharded(values) or values.is_meta)
        self._first = values.detach().flatten()[:64].clone() if is_read else None
        self._differs: HostCopy | None = None

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


def warn_of_average() -> None:
    """Warn of a copy that is updated like an average, but does not follow the pattern."""
    logs.warn(
        "a copy of a sparse model is written to and needs no gradients, like an average of its "
        "weights (EMA), but keeps its pattern while that of the model changes, so its values "
        "belong to other weights: call dynsparse.nn.follow_patterns(average, model) when the copy "
        "is made"
    )
