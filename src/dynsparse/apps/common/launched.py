"""A training in several processes that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dynsparse.ranks import Ranks, ranks_of


@contextmanager
def launched(device: str) -> Iterator[Ranks]:
    """The ranks of this program: this process alone, unless torchrun started several.

    The group is made here and ended at the end, unless somebody had made one.

    Args:
        device: where each rank computes: "cuda" becomes the GPU of its number on the machine.
    """
    distributed = torch.distributed
    several = distributed.is_available() and distributed.is_torchelastic_launched()
    if not several or distributed.is_initialized():
        yield ranks_of("auto")
        return
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield ranks_of("auto")
    finally:
        distributed.destroy_process_group()
