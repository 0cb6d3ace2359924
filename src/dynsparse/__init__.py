"""Dynamic sparse training that really is sparse.

A layer stores only its non-zero weights, the cost of its three passes is proportional to them, and
the pattern of non-zeros changes during training.
"""

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dynsparse import nn, ops
from dynsparse._core import logs, native
from dynsparse._core.version import __version__ as __version__
from dynsparse.nn import (
    densify,
    freeze,
    load_pretrained,
    load_safetensors,
    param_groups,
    quantize,
    save_safetensors,
    sparsify,
    transformers_import,
)
from dynsparse.pattern import SparsePattern
from dynsparse.tracing import trace

if TYPE_CHECKING:
    from dynsparse import distributed, integrations, training
    from dynsparse.training import (
        GMP,
        MEST,
        SET,
        SNFS,
        DeepR,
        GraNet,
        RigL,
        Static,
        TopKAST,
    )

__all__ = [
    "GMP",
    "MEST",
    "SET",
    "SNFS",
    "DeepR",
    "GraNet",
    "RigL",
    "SparsePattern",
    "Static",
    "TopKAST",
    "densify",
    "distributed",
    "freeze",
    "integrations",
    "load_pretrained",
    "load_safetensors",
    "nn",
    "ops",
    "param_groups",
    "quantize",
    "save_safetensors",
    "sparsify",
    "trace",
    "training",
]

# Loaded on first access, so that `import dynsparse` takes little longer than `import torch`.
_PACKAGES = ("distributed", "integrations", "training")
_TRAINERS = ("GMP", "MEST", "SET", "SNFS", "DeepR", "GraNet", "RigL", "Static", "TopKAST")

with suppress(ValueError):  # the first use raises it
    logs.configure()
transformers_import.register_on_import()
native.warn_if_absent()


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name in _TRAINERS:
        return getattr(import_module(f"{__name__}.training"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
