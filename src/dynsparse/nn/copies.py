"""Copies of sparse layers: which are made to follow the original's pattern, and which should."""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch import Tensor

from dynsparse._core import logs
from dynsparse.nn.sharded import is_sharded

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
    """The state of a copy's values when it was made, to find out whether they were written to.

    On a CPU some of them are compared, which also finds what was written through `.data`; elsewhere
    only their version, since the host would wait for the device.
    """

    def __init__(self, values: Tensor) -> None:
        self._version = None if values.is_inference() else values._version
        is_read = values.is_cpu and not is_sharded(values)
        self._first = values.detach().flatten()[:64].clone() if is_read else None

    def is_written(self, values: Tensor) -> bool:
        """Whether the values have changed since."""
        now = Snapshot(values)
        if now._version != self._version:
            return True
        if now._first is None or self._first is None or now._first.dtype != self._first.dtype:
            return False
        return not torch.equal(now._first, self._first)


def warn_of_average() -> None:
    """Warn of a copy that is updated like an average, but does not follow the pattern."""
    logs.warn(
        "a copy of a sparse model is written to and needs no gradients, like an average of its "
        "weights (EMA), but keeps its pattern while that of the model changes, so its values "
        "belong to other weights: call dynsparse.nn.follow_patterns(average, model) when the copy "
        "is made"
    )
