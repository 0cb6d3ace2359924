"""Freed memory: kept for the next step, or returned to the system after a pattern update."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

from torch import Tensor

from dynsparse._core import native
from dynsparse.ops.linear import cpu_dense

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4

# Bytes of values from which an update returns its arrays; below, allocating the memory again would
# cost more than the update.
_WORTHWHILE = 4 << 20

# Bytes of values from which each part of an update returns its arrays, for a lower peak: the next
# part allocates the memory again, which takes a tenth of the time of an update.
_LARGE = 8 << 20


def keep_memory() -> bool:
    """Let this process keep the memory that tensors free, for those of the next step.

    A training step allocates and frees tensors of megabytes. glibc, the C library of most Linux
    systems, returns such memory to the system and gets it back zeroed, page by page, which can take
    a tenth of a step or more. After this call the process keeps all memory that it frees, as with
    `MALLOC_TRIM_THRESHOLD_` and `MALLOC_MMAP_MAX_` in the environment. It then holds about what it
    needed at its peak, somewhat more since large tensors leave gaps between small ones; a pattern
    update of a large layer returns what is unused. Call it before the first step.

    Returns:
        Whether it took effect: False where the C library is not glibc.
    """
    mallopt = _glibc_function("mallopt")
    return mallopt is not None and all(
        [mallopt(_M_TRIM_THRESHOLD, -1) == 1, mallopt(_M_MMAP_MAX, 0) == 1]
    )


def release_memory(values: Tensor, *, in_update: bool = False) -> None:
    """Return freed memory to the system.

    glibc keeps freed blocks of up to 32 MiB, also between blocks in use, where the next array may
    not fit. Pattern updates allocate and free many arrays of that size, and the resident memory
    would grow from one to the next. With other C libraries this returns the scratch memory that
    kernels keep from call to call, and nothing else.

    Args:
        values: of the layer that is updated; for small ones this does nothing.
        in_update: whether the update is still in progress.
    """
    if not values.is_cpu or values.nbytes < (_LARGE if in_update else _WORTHWHILE):
        return
    library = native.load()
    if library is not None:
        library.dynsparse_release_scratch()
    cpu_dense.release_memory()
    trim = _glibc_function("malloc_trim")
    if trim is not None:
        trim(0)


@cache
def _glibc_function(name: str) -> Callable[..., int] | None:
    if sys.platform != "linux" or not hasattr(library := ctypes.CDLL(None), "gnu_get_libc_version"):
        return None
    return getattr(library, name)
