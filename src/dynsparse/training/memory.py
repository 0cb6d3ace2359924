"""Memory that is freed: held for the next step, or given back after a pattern update."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

from torch import Tensor

from dynsparse import native
from dynsparse.ops.linear import cpu_dense

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


# Values of so many bytes make an update whose arrays are worth handing back; below, fetching the
# memory anew would cost more than the update.
_WORTHWHILE = 4 << 20

# And of so many, one whose parts each hand back what they have freed, for a lower peak: what is
# handed back has to be fetched anew by the next part, at a tenth of the time of an update.
_LARGE = 8 << 20


def keep_memory() -> bool:
    """Let this process keep the memory that tensors free, for those of the next step.

    A training step makes and frees tensors of megabytes. glibc, the C library of most Linuxes,
    gives such memory back to the system and fetches it anew, zeroed, page by page, which can take
    a tenth of a step and more. After this call what is freed stays with the process, as with
    `MALLOC_TRIM_THRESHOLD_` and `MALLOC_MMAP_MAX_` in the environment: for all of it, whoever
    allocates, and to its end. The process then holds about what it needed at its peak, somewhat
    more since large tensors leave gaps between small ones; a pattern update of a large layer
    gives back what is unused then. Call it before the first step.

    Returns:
        Whether it was done: False where the C library is not glibc, and nothing has changed.
    """
    mallopt = _of_glibc("mallopt")
    return mallopt is not None and all(
        [mallopt(_M_TRIM_THRESHOLD, -1) == 1, mallopt(_M_MMAP_MAX, 0) == 1]
    )


def release_memory(values: Tensor, *, within: bool = False) -> None:
    """What was freed goes back to the system.

    glibc keeps freed blocks of up to 32 MiB for later, also between blocks in use, where the next
    array may not fit. Pattern updates allocate and free many arrays of that size, and the
    resident memory would creep up from one to the next. Elsewhere this does nothing. The kernels
    keep scratch memory of their own from call to call, which goes back too.

    Args:
        values: of the layer that is updated; with small ones nothing is worth the call.
        within: the update goes on.
    """
    if values.is_cpu and values.nbytes >= (_LARGE if within else _WORTHWHILE):
        _release()


def _release() -> None:
    library = native.load()
    if library is not None:
        library.dynsparse_release_scratch()
    cpu_dense.release_memory()
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


@cache
def _of_glibc(name: str) -> Callable[..., int] | None:
    if sys.platform != "linux" or not hasattr(library := ctypes.CDLL(None), "gnu_get_libc_version"):
        return None
    return getattr(library, name)
