"""Memory that a pattern update frees, and others hold back."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from torch import Tensor

from dynsparse import native
from dynsparse.ops.linear.kernels import dense

__all__ = ["released_memory"]


# Values of so many bytes make an update whose arrays are worth handing back; below, fetching the
# memory anew would cost more than the update.
_WORTHWHILE = 4 << 20


@contextmanager
def released_memory(values: Tensor) -> Iterator[None]:
    """What was freed before this part of an update and within it goes back to the system.

    glibc keeps freed blocks of up to 32 MiB for later, also between blocks in use, where the next
    array may not fit. Pattern updates allocate and free many arrays of that size, and the
    resident memory would creep up from one to the next. Elsewhere this does nothing. The kernels
    keep scratch memory of their own from call to call, which goes back too.

    Args:
        values: of the layer that is updated; with small ones nothing is worth the call.
    """
    large = values.is_cpu and values.nbytes >= _WORTHWHILE
    if large:
        _release()
    yield
    if large:
        _release()


def _release() -> None:
    library = native.load()
    if library is not None:
        library.dynsparse_release_scratch()
    dense.release()
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
