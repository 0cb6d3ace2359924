"""Puts this folder on the import path."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def keras_of_float64():
    """Set Keras to float64, including learning rates and data, which Keras casts."""
    from keras_networks import keras  # only where it is asked for

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")
