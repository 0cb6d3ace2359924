"""Small Keras networks with sparse layers, and their trainings."""

import os
import warnings

import numpy as np
import pytest

from dynsparse.training.algorithms import BY_NAME

os.environ.setdefault("KERAS_BACKEND", "torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    keras = pytest.importorskip("keras")
    from dynsparse.integrations import keras as sparse

# By gradient, of changing sizes, with random numbers at every step, and with an active set.
KINDS = ["rigl", "snfs", "gmp", "deepr", "topkast"]
OPTIONS = {
    name: {"seed": 3} if "seed" in algorithm.arguments else {}
    for name, algorithm in BY_NAME.items()
}
TIMED = {name: {"update_interval": 3} for name in BY_NAME if name not in ("static", "deepr")}


def options(name):
    made = OPTIONS[name] | TIMED.get(name, {})
    if "total_steps" in BY_NAME[name].arguments:
        made["total_steps"] = 20
    if "final_density" in BY_NAME[name].arguments:
        made["final_density"] = 0.2
    return made


def blocks(name):
    """Return the block size; algorithms that move blocks between layers require a single one."""
    return 1 if name in ("snfs", "granet") else 2


def numbers(*shape, seed=0, dtype="float64"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def network(density=0.3, seed=0, dropout=0.0, dtype="float64", block_size=2, **compiled):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((12,), dtype=dtype),
            sparse.SparseDense(16, "relu", density=density, dtype=dtype),
            keras.layers.Dropout(dropout, dtype=dtype),
            sparse.SparseDense(4, density=density, block_size=block_size, dtype=dtype),
        ]
    )
    compiled.setdefault("optimizer", keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(loss="mse", **compiled)
    return model


def fit(model, *callbacks, epochs=2, shuffle=False, **more):
    x, y = numbers(40, 12), numbers(40, 4, seed=1)
    return model.fit(
        x, y, batch_size=4, epochs=epochs, shuffle=shuffle, verbose=0, callbacks=callbacks, **more
    )


def same_bits(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(a), keras.ops.convert_to_numpy(b))


def equal(model, other):
    same_bits(model.weights, other.weights)
    same_bits(model.optimizer.variables, other.optimizer.variables)
