"""Sparse layers, conversion and callbacks for Keras 3 on torch.

    import os
    os.environ["KERAS_BACKEND"] = "torch"
    from dynsparse.integrations import keras as sparse

`CALLBACKS` has a callback for each algorithm, which is found by its name here too: `sparse.RigL`.
"""

from typing import Any

from dynsparse.integrations.keras.callbacks import CALLBACKS, SparseCallback
from dynsparse.integrations.keras.conv import SparseConv2D
from dynsparse.integrations.keras.convert import sparsify
from dynsparse.integrations.keras.dense import SparseDense

__all__ = ["CALLBACKS", "SparseCallback", "SparseConv2D", "SparseDense", "sparsify"]


def __getattr__(name: str) -> Any:
    if name in CALLBACKS:
        return CALLBACKS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
