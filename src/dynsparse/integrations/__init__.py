"""Sparse models in other libraries: Lightning, Hugging Face, PEFT, Keras, ONNX and onnxruntime.

Each of `lightning`, `huggingface`, `peft`, `keras`, `onnx` and `onnxruntime` is loaded on first
access and needs its library.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

_MODULES = ("huggingface", "keras", "lightning", "onnx", "onnxruntime", "peft")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@contextmanager
def require_package(package: str, needs: str, install: str | None = None) -> Iterator[None]:
    """Raise ImportError with the command that installs `package` if an import inside misses it.

    Errors of a package that is installed are raised as they are.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        command = f"pip install {install or package}"
        raise ImportError(f"{needs} the package {package}: {command}") from None
