"""Sparse models in other libraries: Lightning, Hugging Face, PEFT, Keras, ONNX and onnxruntime.

Each of `lightning`, `huggingface`, `peft`, `keras`, `onnx` and `onnxruntime` is loaded on first
access and needs its library.
"""

from importlib import import_module
from typing import Any

_MODULES = ("huggingface", "keras", "lightning", "onnx", "onnxruntime", "peft")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
