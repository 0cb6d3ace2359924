"""Why a layer is being copied."""

from __future__ import annotations

import sys
from types import FrameType

# Where others copy a model to average its weights from then on.
_AVERAGERS = ("torch/optim/swa_utils.py", "timm/utils/model_ema.py")


def is_averaging() -> bool:
    """Whether the copy under way is made by one who will average the weights in it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.replace("\\", "/").endswith(_AVERAGERS):
            return True
        frame = frame.f_back
    return False
