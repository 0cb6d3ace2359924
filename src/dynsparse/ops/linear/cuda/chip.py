"""What the kernels need to know of a device: whether it runs them, and how it multiplies."""

from __future__ import annotations

import functools
import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dynsparse._core import logs


class Chip(NamedTuple):
    """The properties of a device that the kernels depend on.

    Attributes:
        capability: CUDA compute capability.
        multiprocessors: number of them.
        cache: bytes of the L2 cache.
    """

    capability: tuple[int, int]
    multiprocessors: int
    cache: int


LEAST_CAPABILITY = (8, 0)
"""The first with tensor cores for bfloat16 and tf32, and asynchronous copies."""

LEAST_TRITON = (3, 6)
"""The oldest version that the kernels were tested with."""

INTERPRETED = Chip((9, 0), 132, 60 << 20)
"""A Hopper chip, for tensors on the CPU, which only Triton's interpreter computes."""


@functools.cache
def chip_of(device: torch.device) -> Chip:
    """Return the device's chip; the driver is queried once."""
    if device.type != "cuda":
        return INTERPRETED
    facts = torch.cuda.get_device_properties(device)
    return Chip((facts.major, facts.minor), facts.multi_processor_count, facts.L2_cache_size)


def triton_version() -> str | None:
    """Return the version of the installed Triton; None without one."""
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


@functools.cache
def runs_triton(device: torch.device) -> bool:
    """Whether the kernels run on this device; if a GPU lacks something, warns once.

    They need an NVIDIA GPU of capability 8.0 or later, and Triton 3.6 or later with the C compiler
    that it needs.
    """
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
        logs.warn(
            "dynsparse computes layers of blocks by dense products, without its kernels for GPUs: "
            f"{missing}",
            RuntimeWarning,
        )
    return missing is None


def _builds_launchers() -> bool:
    """Whether Triton can build its launchers: with a C compiler and Python.h."""
    import sysconfig

    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = sysconfig.get_config_var("INCLUDEPY")
    return compiler is not None and Path(headers, "Python.h").exists()


_NOTHING = nullcontext()


def current_device(tensor: Tensor) -> AbstractContextManager:
    """Make the tensor's device the current one, on which Triton launches, with its CUDA context."""
    if tensor.is_cuda:
        if tensor.device.index != torch.cuda.current_device():
            return torch.cuda.device(tensor.device)
        # Triton encodes descriptors for the copy engine before its own calls of CUDA give the
        # thread its context, which a thread of autograd has not had yet. This call does it.
        torch.cuda.is_current_stream_capturing()
    return _NOTHING


# ---- how operands are multiplied ----

Precision = Literal["tf32", "tf32x3"]
Numbers = Literal["16-bit", "tf32", "tf32x3"]


def precision_of(dtype: torch.dtype) -> Precision:
    """Return the `input_precision` of `tl.dot`, which 16-bit operands ignore.

    float32 is split into three products of tf32 unless torch's float32 products may use tf32
    (`torch.set_float32_matmul_precision("high")`, or `torch.backends.cuda.matmul.fp32_precision =
    "tf32"`).
    """
    if dtype is not torch.float32:
        return "tf32"
    backend = torch.backends.cuda.matmul
    # From torch 2.9 on the old query fails after the new setting was used.
    if hasattr(backend, "fp32_precision"):
        return "tf32" if backend.fp32_precision == "tf32" else "tf32x3"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def numbers_of(dtype: torch.dtype) -> Numbers:
    """Return the kind of numbers that the tensor cores multiply."""
    return precision_of(dtype) if dtype is torch.float32 else "16-bit"
