"""Finds and loads the compiled kernels, one library per instruction set.

The libraries are plain C behind ctypes, without torch headers: one build serves every torch and
Python version. They are compiled with OpenMP but linked without a runtime, so they run on the
threads of the runtime that torch has loaded; the number of threads goes along with every call.
Where no library fits the machine, everything computes through plain torch.

`DYNSPARSE_ISA` chooses the instruction set: `v2`, `v3`, `v4` (the x86-64 levels), `neon` (ARM of 64
bits) or `base` (other machines), or `none` for plain torch. `DYNSPARSE_BF16_UNIT` may ask for less
than the processor has for blocks of bfloat16: `1` AVX-512 dot products, `0` float32.

What a library exports, and what each function promises, is in `csrc/api.h`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Iterator, Set
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dynsparse._core import logs
from dynsparse._core.processor import processor

_log = logging.getLogger(__name__)

_FOLDER = Path(__file__).resolve().parents[1] / "_native"

# Best first.
_X86_LEVELS = {
    "v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
    "v2": {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"},
}
_ISAS = (*_X86_LEVELS, "neon", "base")

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64
_INT = ctypes.c_int32
_MATRIX = [_POINTER, _SIZE, _SIZE]  # data, stride of the batch, stride of the features

# function -> (result, arguments), as declared in csrc/api.h
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "dynsparse_linear_forward": (
        ctypes.c_int,
        [*_MATRIX, *[_POINTER] * 7, *[_SIZE] * 4, _INT],
    ),
    "dynsparse_linear_backward": (
        ctypes.c_int,
        [*_MATRIX, *_MATRIX, *[_POINTER] * 12, *[_SIZE] * 4, _INT],
    ),
    "dynsparse_linear_forward_bf16": (
        ctypes.c_int,
        [*_MATRIX, _POINTER, _INT, *[_POINTER] * 6, *[_SIZE] * 4, _INT],
    ),
    "dynsparse_linear_backward_bf16": (
        ctypes.c_int,
        [*_MATRIX, *_MATRIX, _POINTER, _INT, *[_POINTER] * 11, *[_SIZE] * 4, _INT],
    ),
    "dynsparse_int8_forward": (ctypes.c_int, [*_MATRIX, *[_POINTER] * 8, *[_SIZE] * 4, _INT, _INT]),
    "dynsparse_conv_forward": (ctypes.c_int, [*[_POINTER] * 9, _INT]),
    "dynsparse_conv_backward": (ctypes.c_int, [*[_POINTER] * 12, _INT]),
    "dynsparse_attention_forward": (
        ctypes.c_int,
        [*[_POINTER] * 13, ctypes.c_float, ctypes.c_uint64, _INT, ctypes.c_float, _INT],
    ),
    "dynsparse_attention_backward": (
        ctypes.c_int,
        [*[_POINTER] * 21, ctypes.c_float, ctypes.c_uint64, _INT, ctypes.c_float, _INT],
    ),
    "dynsparse_bf16_unit": (_INT, []),
    "dynsparse_masks_expand": (_INT, []),
    "dynsparse_panels_from": (_SIZE, [*[_SIZE] * 3, _INT]),
    "dynsparse_panels_size": (_SIZE, [*[_SIZE] * 3, _INT, _SIZE]),
    "dynsparse_panels_bytes": (_SIZE, [*[_SIZE] * 4, _INT]),
    "dynsparse_panels_make": (
        ctypes.c_int,
        [*[_POINTER] * 3, _INT, *[_SIZE] * 3, _POINTER, _INT],
    ),
    "dynsparse_pattern_merge": (
        ctypes.c_int,
        [*[_POINTER] * 3, _SIZE, _SIZE, *[_POINTER, _SIZE] * 2, *[_POINTER] * 4, _INT],
    ),
    "dynsparse_pattern_by_columns": (
        ctypes.c_int,
        [*[_POINTER] * 3, _SIZE, _SIZE, *[_POINTER] * 3, _INT],
    ),
    "dynsparse_pattern_unpack": (
        ctypes.c_int,
        [_POINTER, _SIZE, _INT, *[_SIZE] * 3, *[_POINTER] * 3],
    ),
    "dynsparse_pattern_move": (None, [_POINTER, _SIZE, _POINTER, _SIZE, _POINTER, _INT]),
    "dynsparse_pattern_large_pages": (None, [_POINTER, _SIZE]),
    "dynsparse_grow_compact": (ctypes.c_int, [_POINTER, _POINTER, _SIZE, _SIZE, _INT]),
    "dynsparse_grow_pool": (None, [_POINTER, *[_SIZE] * 3, _INT, _POINTER, _INT]),
    "dynsparse_grow_scan": (
        _SIZE,
        [
            *[_POINTER, _SIZE, _SIZE, _POINTER, _POINTER],
            *[ctypes.c_float, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, _INT],
        ],
    ),
    "dynsparse_grow_screen": (
        ctypes.c_int,
        [
            *[*_MATRIX, *_MATRIX, *[_SIZE] * 3, *[_POINTER] * 2],
            *[ctypes.c_float, ctypes.c_float, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE],
            *[_POINTER, _INT],
        ],
    ),
    "dynsparse_grow_screens": (_INT, []),
    "dynsparse_grow_select": (ctypes.c_int, [_POINTER, _SIZE, _SIZE, _INT, _POINTER, _INT]),
    "dynsparse_rank_keys": (None, [_POINTER, _SIZE, _INT, _POINTER]),
    "dynsparse_rank_digits": (None, [_POINTER, _SIZE, _INT, _INT, _POINTER]),
    "dynsparse_rank_narrow": (None, [_POINTER, _SIZE, *[_INT] * 3, _POINTER, _SIZE]),
    "dynsparse_rank_places": (_SIZE, [_POINTER, _SIZE, _SIZE, _POINTER]),
    "dynsparse_small_masks": (None, [*[_POINTER] * 3, *[_SIZE] * 2, _INT]),
    "dynsparse_small_masks_samples": (_SIZE, [*[_SIZE] * 3, _INT]),
    "dynsparse_small_forward": (
        ctypes.c_int,
        [*_MATRIX, *[_POINTER] * 6, *[_SIZE] * 4, _INT],
    ),
    "dynsparse_small_backward": (
        ctypes.c_int,
        [*_MATRIX, *_MATRIX, *[_POINTER] * 7, *[_SIZE] * 4, _INT],
    ),
    "dynsparse_sparse_input_forward": (None, [*[_POINTER] * 9, *[_SIZE] * 3, _INT]),
    "dynsparse_sparse_input_backward": (None, [*[_POINTER] * 8, *[_SIZE] * 3, _INT]),
    "dynsparse_rows_to_dense": (None, [*[_POINTER] * 5, *[_SIZE] * 4, _INT]),
    "dynsparse_rows_from_dense": (None, [*[_POINTER] * 5, *[_SIZE] * 4, _INT]),
    "dynsparse_dropout": (
        None,
        [*[_POINTER] * 2, _SIZE, ctypes.c_uint64, _INT, ctypes.c_float, _INT],
    ),
    "dynsparse_release_scratch": (None, []),
}


def _x86_levels(flags: Set[str]) -> list[str]:
    """Return the x86-64 levels, best first, of a processor with these features."""
    levels: list[str] = []
    for level in ("v2", "v3", "v4"):
        if not _X86_LEVELS[level] <= flags:
            break
        levels.insert(0, level)
    return levels


@cache
def supported_isas() -> tuple[str, ...]:
    """Return the instruction sets that this machine can run, best first, built or not."""
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        return ("neon",)  # part of every such processor
    if machine not in ("x86_64", "amd64"):
        return ("base",)
    flags = processor().flags
    return tuple(_x86_levels(flags)) if flags else ("v2",)


def _library_path(isa: str, kind: str = "") -> Path:
    return _FOLDER / f"libdynsparse_{kind}{isa}.so"


def _built_isas() -> list[str]:
    return [isa for isa in _ISAS if _library_path(isa).exists()]


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        # The OpenMP symbols did not resolve: torch keeps its runtime to itself. Opening that very
        # copy once more makes its symbols global; it never adds a second runtime.
        libraries = sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*"))
        if not libraries:
            raise
        ctypes.CDLL(str(libraries[0]), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))


_REMEDY = "reinstall dynsparse where GCC 12 or Clang 12 is (CXX=g++-12 pip install ...)"


def _absence_reason() -> str:
    """Return the reason why this installation has no kernels, as its build recorded it."""
    try:
        return (_FOLDER / "left_out.txt").read_text(encoding="utf-8").strip()
    except OSError:
        return "they are not in this installation"


@cache
def load_isa(isa: str) -> ctypes.CDLL:
    """Load the library of one instruction set, and set the signatures of its functions.

    Raises:
        ValueError: a name that is not an instruction set, or one this machine cannot run.
        OSError: the library is not there or cannot be loaded.
    """
    path = _existing_library(isa)
    library = _open(path)
    _log.debug("loaded %s", path)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    _watch_forks()
    return library


def _existing_library(isa: str, kind: str = "") -> Path:
    """Return the path of the library of one instruction set.

    Raises:
        ValueError, OSError: as `load_isa`.
    """
    if isa not in _ISAS:
        raise ValueError(
            f"DYNSPARSE_ISA must be one of v2, v3, v4, neon, base or none, got {isa!r}: "
            "unset it to let dynsparse choose"
        )
    if isa not in supported_isas():
        runs = ", ".join(supported_isas()) or "none of them"
        raise ValueError(
            f"DYNSPARSE_ISA is {isa}, but this machine runs {runs}: "
            "choose one of these, or unset it to let dynsparse choose"
        )
    path = _library_path(isa, kind)
    if not path.exists():
        built = ", ".join(_built_isas())
        raise OSError(
            f"the kernels for {isa} are not in this installation "
            f"({f'only those for {built}' if built else _absence_reason()}): "
            f"{_REMEDY}, or unset DYNSPARSE_ISA"
        )
    return path


def find_library(kind: str) -> Path:
    """Return the path of the library for DYNSPARSE_ISA, or for the best instruction set.

    Args:
        kind: "" for the kernels, "onnxruntime_" for the operator of ONNX Runtime.

    Raises:
        ValueError, OSError: as `load_isa`.
    """
    requested = _requested_isa()
    if requested not in ("", "none"):
        return _existing_library(requested, kind)
    for isa in supported_isas():
        if (path := _library_path(isa, kind)).exists():
            return path
    raise OSError(f"no compiled kernels: {_absence_reason()}. {_REMEDY.capitalize()}")


def _requested_isa() -> str:
    return os.environ.get("DYNSPARSE_ISA", "").strip().lower()


@cache
def _watch_forks() -> None:
    """Let a forked child compute on one thread, until it asks torch for more.

    The threads of OpenMP do not exist in the child, where work for them would wait forever: for
    torch's own operators as for ours. torch's data loaders do the same in their workers.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


class _Choice(NamedTuple):
    isa: str
    library: ctypes.CDLL | None
    reason: str  # why there is no library


@cache
def _choose() -> _Choice:
    logs.configure()  # the first use of the library: errors in the environment are raised here
    choice = _load_best()
    if choice.library is None:
        _log.info("no compiled kernels: %s", choice.reason)
    else:
        _log.info("kernels for %s, %d threads", choice.isa, torch.get_num_threads())
    return choice


def _load_best() -> _Choice:
    requested = _requested_isa()
    if requested == "none":
        return _Choice("none", None, "DYNSPARSE_ISA=none")
    if requested:
        return _Choice(requested, load_isa(requested), "")
    reason = ""
    for isa in supported_isas():
        try:
            return _Choice(isa, load_isa(isa), "")
        except (OSError, AttributeError) as error:
            if _library_path(isa).exists():
                reason = str(error)
    built = _built_isas()
    if not built:
        reason = _absence_reason()
    elif not reason:
        reason = f"they are for {', '.join(built)}, which this machine does not run"
    logs.warn(
        f"dynsparse computes without its compiled kernels, several times slower: {reason}. "
        f"To fix it, {_REMEDY}; DYNSPARSE_ISA=none silences this",
        RuntimeWarning,
    )
    return _Choice("none", None, reason)


def warn_if_absent() -> None:
    """Warn, at import, if the package was installed without kernels; load nothing.

    If DYNSPARSE_ISA is set, the first use reports what is missing.
    """
    if not _requested_isa() and not _built_isas():
        _choose()


@cache  # without a call of a Python function: every product asks
def load() -> ctypes.CDLL | None:
    """Load the library for this machine, once; return None if everything runs in plain torch.

    Warns once, with a RuntimeWarning, if no compiled library can be used and DYNSPARSE_ISA is not
    "none".

    Raises:
        ValueError: DYNSPARSE_ISA is unknown, or an instruction set that this machine cannot run.
        OSError: DYNSPARSE_ISA names an instruction set whose library is missing.
    """
    return _choose().library


@contextmanager
def use_isa(isa: str) -> Iterator[None]:
    """Compute with the kernels of one instruction set inside this block, in the whole process.

    For checks and comparisons; "none" is plain torch. Layers remember which kernels compute them:
    do not use a layer outside that was made inside.

    Raises:
        ValueError, OSError: as `load_isa`.
    """
    library = None if isa == "none" else load_isa(isa)
    before = globals()["load"]
    globals()["load"] = lambda: library
    try:
        yield
    finally:
        globals()["load"] = before


def call(function: str, *arguments: Any) -> Any:
    """Call a function of the compiled kernels, which must be loaded; see `csrc/api.h`.

    Tensors and arrays are passed by their addresses, None as a null pointer.
    """
    library = load()
    assert library is not None
    return getattr(library, function)(*[_address(argument) for argument in arguments])


def _address(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return argument.ctypes.data if isinstance(argument, np.ndarray) else argument


_BFLOAT16_UNITS = ("float32", "AVX-512", "AMX")


def bfloat16_unit() -> str:
    """Return the unit that multiplies bfloat16 blocks of 16 to 128.

    "AMX" (matrix units), "AVX-512" (dot products of pairs), or "float32", to which they are
    widened.
    """
    library = load()
    return "float32" if library is None else _BFLOAT16_UNITS[library.dynsparse_bf16_unit()]


def expands_masks() -> bool:
    """Whether the kernels expand bit masks in hardware; otherwise they read them bit by bit."""
    library = load()
    return library is not None and bool(library.dynsparse_masks_expand())


def describe() -> dict[str, Any]:
    """Describe the kernels in use, for `dynsparse info` and for records of measurements.

    Returns:
        `backend`: "native" or "fallback"; `isa`: the chosen instruction set or "none"; `available`:
        the instruction sets that are both built and runnable; `reason`: why the backend is the
        fallback, else empty; `bfloat16`: see `bfloat16_unit`; `threads`: the number torch uses now.
    """
    isa, library, reason = _choose()
    return {
        "backend": "fallback" if library is None else "native",
        "isa": isa,
        "reason": reason,
        "available": [name for name in supported_isas() if _library_path(name).exists()],
        "bfloat16": bfloat16_unit(),
        "threads": torch.get_num_threads(),
    }
