"""What the kernels must know of a device, and whether it can run them."""

from __future__ import annotations

import functools
import os
import shutil
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class Chip(NamedTuple):
    """A device, as far as the kernels care.

    Attributes:
        capability: its CUDA compute capability.
        multiprocessors: how many there are.
        cache: bytes of its L2 cache.
    """

    capability: tuple[int, int]
    multiprocessors: int
    cache: int


LEAST_CAPABILITY = (8, 0)
"""Tensor cores that take bfloat16 and tf32, and asynchronous copies."""

LEAST_TRITON = (3, 6)
"""The oldest that the kernels were checked with."""

INTERPRETED = Chip((9, 0), 132, 60 << 20)
"""An H200: what tensors on the CPU count as, which only Triton's interpreter computes."""


@functools.cache
def chip_of(device: torch.device) -> Chip:
    """The device's chip; asked of the driver once."""
    if device.type != "cuda":
        return INTERPRETED
    found = torch.cuda.get_device_properties(device)
    return Chip((found.major, found.minor), found.multi_processor_count, found.L2_cache_size)


def triton_version() -> str | None:
    """Of the Triton that is installed."""
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


@functools.cache
def runs_triton(device: torch.device) -> bool:
    """Whether the kernels run on this device: an NVIDIA GPU of capability 8.0 or later, and Triton
    3.6 or later installed, with the C compiler that it needs. What is missing is said once, by a
    RuntimeWarning."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    missing = None
    if torch.version.hip is not None:
        missing = "they are written for NVIDIA GPUs"
    elif chip_of(device).capability < LEAST_CAPABILITY:
        major, minor = chip_of(device).capability
        missing = f"they need compute capability 8.0, {device} has {major}.{minor}"
    elif (version := triton_version()) is None:
        missing = "Triton is not installed (pip install triton)"
    elif tuple(map(int, version.split(".")[:2])) < LEAST_TRITON:
        missing = f"they need Triton 3.6 or later, got {version} (a later torch brings it)"
    elif not _builds_launchers():
        missing = "Triton needs a C compiler and Python.h (install gcc and python3-dev)"
    if missing is not None:
        warnings.warn(
            "dynsparse computes layers of blocks by dense products, without its kernels for GPUs: "
            f"{missing}",
            RuntimeWarning,
            stacklevel=2,
        )
    return missing is None


def _builds_launchers() -> bool:
    """Whether there is what Triton builds the code with that starts kernels."""
    import sysconfig

    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = sysconfig.get_config_var("INCLUDEPY")
    return compiler is not None and Path(headers, "Python.h").exists()


def current_device(tensor: Tensor) -> AbstractContextManager:
    """The tensor's device is the current one meanwhile: Triton launches there."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()
