"""Sparse layers, conversion and callbacks for Keras 3 on torch.

    import os
    os.environ["KERAS_BACKEND"] = "torch"
    from dynsparse.integrations import keras as sparse

`CALLBACKS` maps the name of each algorithm to its callback, also an attribute here: `sparse.RigL`.
"""

from typing import Any

from dynsparse.integrations import require_package

try:
    with require_package("keras", f"{__name__} needs"):
        import keras
except ModuleNotFoundError as error:
    if error.name not in ("tensorflow", "jax", "openvino"):  # not the configured backend
        raise
    raise ImportError(
        f"{__name__} needs Keras on torch, got a backend that cannot be imported ({error}): set "
        "KERAS_BACKEND=torch before keras is imported"
    ) from None

if keras.config.backend() != "torch":
    raise ImportError(
        f"{__name__} needs Keras on torch, got {keras.config.backend()}: set KERAS_BACKEND=torch "
        "before keras is imported"
    )

from dynsparse.integrations.keras.callbacks import CALLBACKS, SparseCallback
from dynsparse.integrations.keras.convert import sparsify
from dynsparse.integrations.keras.layers import SparseConv2D, SparseDense

__all__ = ["CALLBACKS", "SparseCallback", "SparseConv2D", "SparseDense", "sparsify"]


def __getattr__(name: str) -> Any:
    if name in CALLBACKS:
        return CALLBACKS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
