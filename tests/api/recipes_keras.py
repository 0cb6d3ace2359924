"""Valid calls of the Keras integration, if Keras is installed."""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np
from recipes import Recipe

import dynsparse as ds

RECIPES: dict[str, Recipe] = {}

if find_spec("keras") is not None:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    from dynsparse.integrations import keras as sparse

    def network(*layers):
        return keras.Sequential([keras.Input((6,)), *layers])

    def layer(x, kind, **named):
        return kind(**named)(x)

    def trained(**named):
        model = network(sparse.SparseDense(4, density=0.5))
        model.compile("sgd", "mse")
        callback = sparse.SparseCallback(update_interval=1, **named)
        model.fit(np.ones((4, 6)), np.ones((4, 4)), 2, verbose=0, callbacks=[callback])

    shared = {
        "density": 0.5,
        "block_size": 2,
        "use_bias": True,
        "seed": 0,
    }
    RECIPES = {
        "dynsparse.integrations.keras.SparseDense": Recipe(
            lambda **named: layer(np.ones((2, 6)), sparse.SparseDense, **named),
            lambda: {"units": 4, **shared},
        ),
        "dynsparse.integrations.keras.SparseConv2D": Recipe(
            lambda **named: layer(np.ones((2, 5, 5, 4)), sparse.SparseConv2D, **named),
            lambda: {"filters": 4, "kernel_size": 3, "groups": 2, **shared},
        ),
        "dynsparse.integrations.keras.SparseCallback": Recipe(
            trained,
            lambda: {
                "algorithm": ds.RigL,
                "resume": True,
                "restore_random_state": True,
                "telemetry": True,
            },
        ),
        "dynsparse.integrations.keras.sparsify": Recipe(
            lambda **named: sparse.sparsify(verbose=False, **named),
            lambda: {
                "model": network(keras.layers.Dense(8), keras.layers.Dense(4)),
                "density": 0.5,
            },
        ),
    }
