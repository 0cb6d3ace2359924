"""Dynamic sparse training that really is sparse.

A layer holds only its non-zero weights, its three passes cost in proportion to them, and the
pattern of non-zeros changes while the network trains.
"""

from importlib import import_module
from typing import Any

from dynsparse import native, nn, ops, training
from dynsparse.nn import (
    densify,
    load_pretrained,
    load_safetensors,
    param_groups,
    save_safetensors,
    sparsify,
)
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.training import GMP, MEST, SET, SNFS, DeepR, GraNet, RigL, Static, TopKAST
from dynsparse.version import __version__ as __version__

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
    "load_pretrained",
    "load_safetensors",
    "nn",
    "ops",
    "param_groups",
    "save_safetensors",
    "sparsify",
    "training",
]

native.warn_if_absent()


def __getattr__(name: str) -> Any:
    # Loaded only by those who use them.
    if name in ("distributed", "machine", "popsparse"):
        return import_module(f"dynsparse.{name}")
    if name in ("export_onnx", "import_onnx"):
        return getattr(import_module(f"{__name__}.integrations.onnx"), name)
    if name == "plot":
        return import_module("dynsparse.report.training.plot").plot
    raise AttributeError(f"module 'dynsparse' has no attribute {name!r}")
