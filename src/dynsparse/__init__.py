"""Dynamic sparse training that really is sparse.

A layer holds only its non-zero weights, its three passes cost in proportion to them, and the
pattern of non-zeros changes while the network trains.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dynsparse import logs, native, nn, ops
from dynsparse.nn import (
    densify,
    load_pretrained,
    load_safetensors,
    param_groups,
    save_safetensors,
    sparsify,
)
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.tracing import trace
from dynsparse.version import __version__ as __version__

if TYPE_CHECKING:
    from dynsparse import distributed, training
    from dynsparse.integrations.onnx import export_onnx, import_onnx
    from dynsparse.report.training.plot import plot
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
        keep_memory,
    )

__all__ = [
    "GMP",
    "MEST",
    "SET",
    "SNFS",
    "DeepR",
    "GraNet",
    "Rewiring",
    "RigL",
    "SparsePattern",
    "Static",
    "TopKAST",
    "densify",
    "distributed",
    "export_onnx",
    "import_onnx",
    "keep_memory",
    "load_pretrained",
    "load_safetensors",
    "nn",
    "ops",
    "param_groups",
    "plot",
    "save_safetensors",
    "sparsify",
    "trace",
    "training",
]

# Loaded when they are first asked for, so that an import costs little beside torch's own.
_ROOMS = ("distributed", "training")
_NAMES = {
    **dict.fromkeys(("GMP", "MEST", "SET", "SNFS", "DeepR", "GraNet", "RigL"), "training"),
    **dict.fromkeys(("Static", "TopKAST", "keep_memory"), "training"),
    **dict.fromkeys(("export_onnx", "import_onnx"), "integrations.onnx"),
    "plot": "report.training.plot",
}

logs.configure_quietly()
native.warn_if_absent()


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    if name in _NAMES:
        return getattr(import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
