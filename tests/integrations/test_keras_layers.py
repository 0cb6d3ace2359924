"""Sparse layers for Keras, and `sparsify` of Keras models."""

import numpy as np
import pytest
import torch
from keras_networks import equal, fit, keras, numbers, sparse
from torch import nn

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("keras_of_float64")]

CONVOLUTIONS = [
    {},
    {"padding": "same"},
    {"strides": 2, "padding": "same"},
    {"strides": (3, 2), "padding": "same", "kernel_size": (4, 3)},
    {"dilation_rate": 2, "padding": "same", "groups": 2},
    {"data_format": "channels_first", "padding": "same", "strides": 2, "use_bias": False},
    {"activation": "tanh", "block_size": 2},
]


@pytest.mark.parametrize("given", CONVOLUTIONS, ids=lambda given: ",".join(given) or "plain")
def test_convolution_equals_keras(given):
    given = {"kernel_size": 3} | given
    layer = sparse.SparseConv2D(8, density=0.4, seed=1, **given)
    given.pop("block_size", None)
    dense = keras.layers.Conv2D(8, **given)
    first = given.get("data_format") == "channels_first"
    shape = (2, 4, 9, 10) if first else (2, 9, 10, 4)
    x, y = (torch.tensor(numbers(*shape), requires_grad=True) for _ in range(2))
    out = layer(x)
    dense.build(shape)
    dense.kernel.assign(layer.to_dense())
    if dense.use_bias:
        layer.bias.assign(numbers(8))
        dense.bias.assign(numbers(8))
        out = layer(x)
    expected = dense(y)
    assert tuple(out.shape) == tuple(expected.shape) == layer.compute_output_shape(shape)
    torch.testing.assert_close(out, expected.to(out.dtype), rtol=1e-5, atol=1e-6)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-5)
    grad = dense.kernel.value.grad.permute(3, 2, 0, 1)
    matrix = grad.permute(0, 2, 3, 1).reshape(8, -1)
    torch.testing.assert_close(
        layer.values.value.grad, layer.pattern.values_of(matrix), rtol=1e-5, atol=1e-5
    )


def functional():
    inputs = keras.Input((6, 6, 2))
    x = keras.layers.Conv2D(4, 3, padding="same", activation="relu", name="conv")(inputs)
    x = keras.layers.Flatten()(x)
    shared = keras.layers.Dense(144, name="shared")
    x = shared(keras.layers.ReLU()(shared(x)))
    inner = keras.Sequential(
        [keras.Input((144,)), keras.layers.Dense(8, name="hidden")], name="inner"
    )
    constrained = keras.layers.Dense(4, kernel_constraint="non_neg", name="constrained")
    return keras.Model(inputs, constrained(inner(x)))


class Own(keras.Model):
    def __init__(self, **named):
        super().__init__(**named)
        self.first = keras.layers.Dense(16, name="first")
        self.rest = [keras.layers.Dense(16, name="second"), keras.layers.Dense(4, name="head")]

    def call(self, x):
        for layer in self.rest:
            x = layer(keras.ops.relu(self.first(x)) if layer is self.rest[0] else x)
        return x


def test_sparsify_functional_model(capsys, tmp_path):
    model = functional()
    x = numbers(8, 6, 6, 2)
    shared = model.get_layer("shared")
    kernel = shared.kernel.value.detach().clone()
    assert sparse.sparsify(model, 0.25, densities={"inner.*": 0.5}, start="magnitude") is model
    told = capsys.readouterr().out
    assert all(name in told for name in ("conv", "shared", "inner.hidden"))
    assert "Dense" in told  # the constrained one, which stays
    assert model.get_layer("shared") is shared
    assert isinstance(shared, sparse.SparseDense)
    assert shared.values.value is shared.sparse.values
    mask = shared.pattern.to_mask().t()
    torch.testing.assert_close(shared.to_dense(), kernel * mask)
    assert type(model.get_layer("constrained")) is keras.layers.Dense
    inner = model.get_layer("inner").get_layer("hidden")
    assert inner.pattern.density == 0.5
    model.compile("adam", "mse")
    model.fit(x, numbers(8, 4), epochs=3, batch_size=2, verbose=0,
              callbacks=[sparse.RigL(update_interval=2)])  # fmt: skip
    assert len([p for p in model.parameters() if p is shared.sparse.values]) == 1
    held = {id(v.value) for v in model.trainable_variables}
    assert {id(p) for p in model.parameters() if p.requires_grad} == held
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    equal(again, model)
    np.testing.assert_array_equal(again.predict(x, verbose=0), model.predict(x, verbose=0))


def test_sparsify_subclassed_model():
    model = Own()
    with pytest.raises(ValueError, match="build it"):
        sparse.sparsify(model)
    model(numbers(2, 12))
    sparse.sparsify(model, 0.5, exclude=["head"], verbose=False)
    kinds = [type(layer).__name__ for layer in (model.first, *model.rest)]
    assert kinds == ["SparseDense", "SparseDense", "Dense"]
    before = model.first.pattern
    model.compile("adam", "mse")
    callback = sparse.SET(update_interval=2, seed=0)
    fit(model, callback)
    assert list(callback.sparse_trainer.layers) == ["0", "1"]
    assert model.first.pattern != before
    with pytest.raises(ValueError, match="compile it"):
        sparse.sparsify(model)


def test_failing_sparsify_changes_nothing():
    model = functional()
    for given in ({"density": 2.0}, {"exclude": ["nobody"]}, {"block_size": 7}):
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            sparse.sparsify(model, **given)
    assert type(model.get_layer("shared")) is keras.layers.Dense
    with pytest.raises(TypeError, match=r"keras\.Model"):
        sparse.sparsify(nn.Linear(2, 2))


def test_mixed_precision_keeps_values_in_float32():
    layer = sparse.SparseDense(8, density=0.5, dtype="mixed_bfloat16")
    y = layer(numbers(3, 6, dtype="float32"))
    assert (y.dtype, layer.values.value.dtype) == (torch.bfloat16, torch.float32)
    y.sum().backward()
    assert layer.values.value.grad is not None


def test_layers_from_config():
    layer = sparse.SparseDense(8, "relu", density=0.5, block_size=2, seed=3,
                               kernel_regularizer=keras.regularizers.L2(0.1))  # fmt: skip
    x = numbers(3, 6)
    layer(x)
    assert float(layer.losses[0]) == pytest.approx(0.1 * float(layer.values.value.square().sum()))
    again = sparse.SparseDense.from_config(layer.get_config())
    again(x)
    assert again.pattern == layer.pattern
    torch.testing.assert_close(again.values.value, layer.values.value)
    model = keras.Sequential([keras.Input((6,)), layer])
    twin = keras.models.clone_model(model)
    twin.set_weights(model.get_weights())
    np.testing.assert_array_equal(twin.predict(x, verbose=0), model.predict(x, verbose=0))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sparse.SparseDense(0), "units"),
        (lambda: sparse.SparseDense(8, density="relu")(numbers(2, 4)), "density"),
        (lambda: sparse.SparseDense(8, density=1.5)(numbers(2, 4)), "density"),
        (lambda: sparse.SparseDense(8, block_size=3)(numbers(2, 4)), "block"),
        (lambda: sparse.SparseDense(8, kernel_regularizer="orthogonal_regularizer"), "L1, L2"),
        (lambda: sparse.SparseConv2D(8, 3, block_size=2)(numbers(2, 5, 5, 3)), "block"),
    ],
)
def test_wrong_options_raise(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()
