"""The packages for ONNX, and model files as they are read and written."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from dynsparse.files.atomic_write import atomic_write

__all__ = ["library", "quiet", "read_model", "write_model"]

_LARGEST = (1 << 31) - 1
"""Bytes of one protocol buffer, which an ONNX file is."""


def library(name: str) -> Any:
    """The package, or an ImportError that says how to get it."""
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ImportError(
            f"ONNX files need the package {package}: pip install 'dynsparse[onnx]'"
        ) from None


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings with which the packages speak to their own authors."""
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", kind)
        yield


def read_model(path: str | os.PathLike[str]) -> Any:
    """The `ModelProto` of a file, checked.

    Raises:
        ValueError: not an ONNX file, or not a valid one. OSError: it cannot be read.
    """
    onnx = library("onnx")
    path = Path(path)
    path.open("rb").close()
    try:
        model = onnx.load(str(path))
        onnx.checker.check_model(model)
    except Exception as error:  # the parser's and the checker's have no class in common
        raise ValueError(f"{path} is no valid ONNX file: {_first_line(error)}") from None
    return model


def write_model(model: Any, path: str | os.PathLike[str]) -> None:
    """Check the model and write it, whole or not at all.

    Raises:
        ValueError: larger than a protocol buffer can be. OSError: it cannot be written.
    """
    onnx = library("onnx")
    size = model.ByteSize()
    if size > _LARGEST:
        raise ValueError(
            f"the model takes {size:,} bytes, an ONNX file at most {_LARGEST:,}: "
            'export it with weights="sparse", or in a 16-bit type'
        )
    onnx.checker.check_model(model)
    atomic_write(Path(path), lambda file: file.write(model.SerializeToString()))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]
