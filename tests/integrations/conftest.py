"""What the tests share is a module of its own, found from each."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def keras_of_float64():
    """Learning rates and data too, which Keras casts."""
    from keras_networks import keras  # only where it is asked for

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")
