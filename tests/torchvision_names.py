"""Make torchvision and packages that import it importable, also in processes that tests start."""

from importlib.util import find_spec
from pathlib import Path

import torch


def _operators():
    """Their names, where torchvision is built for a torch with CUDA and this one has none.

    The package index has no other torchvision. Its operators do not load then, and without their
    names neither does it, nor does transformers. No test calls them.
    """
    found = find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    try:
        for file in Path(found.origin).parent.glob("_C*.so"):
            torch.ops.load_library(file)
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


library = _operators()
