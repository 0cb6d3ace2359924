"""The operator of sparse layers for onnxruntime 1.17 or later, on the CPU.

`dynsparse.integrations.onnx.export(..., weights="operator")` writes models that use it. The library
needs neither dynsparse nor torch where it runs: other programs load a copy of the file `library()`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynsparse._core import native


def library() -> Path:
    """The file of the operator's library for this machine's best instruction set.

    `DYNSPARSE_ISA` chooses another, as for the kernels. In C++ it is loaded by
    `SessionOptions::RegisterCustomOpsLibrary`.

    Raises:
        OSError: this installation has none, or none for this machine.
        ValueError: `DYNSPARSE_ISA` names an instruction set that this machine does not have.
    """
    return native.find_library("onnxruntime_")


def register(session_options: Any) -> None:
    """Register the operator for sessions with these options.

    Args:
        session_options: an `onnxruntime.SessionOptions`. Its `intra_op_num_threads` are those of
            the operator, too.

    Raises:
        TypeError: anything else.
        OSError, ValueError: as `library`.
    """
    if not hasattr(session_options, "register_custom_ops_library"):
        raise TypeError(
            "session_options must be onnxruntime.SessionOptions(), got "
            f"{type(session_options).__name__}"
        )
    session_options.register_custom_ops_library(str(library()))
