"""Sparse training in Keras equals masked dense layers and a plain loop."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from keras_networks import KINDS, blocks, equal, fit, keras, network, numbers, options, sparse
from torch import nn

import dynsparse as ds
from dynsparse.training.algorithms import BY_NAME

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("keras_of_float64")]

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("name", KINDS)
def test_equals_a_plain_loop(name):
    density = BY_NAME[name].first_density(0.3)
    model = network(density, block_size=blocks(name))
    layers = [layer for layer in model.layers if isinstance(layer, sparse.SparseDense)]
    first, second = (
        ds.nn.SparseLinear(*shape, pattern=layer.pattern, dtype=torch.float64)
        for shape, layer in zip([(12, 16), (16, 4)], layers, strict=True)
    )
    for copy, layer in zip([first, second], layers, strict=True):
        copy.load_state_dict(layer.sparse.state_dict())
    plain = nn.ModuleDict({"1": first, "3": second})
    loop = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    trainer = BY_NAME[name].trainer(plain, loop, **options(name))
    callback = sparse.CALLBACKS[BY_NAME[name].trainer.__name__](**options(name))
    fit(model, callback)
    x, y = torch.tensor(numbers(40, 12)), torch.tensor(numbers(40, 4, seed=1))
    for step in range(20):
        loop.zero_grad()
        batch = slice(4 * (step % 10), 4 * (step % 10) + 4)
        out = second(torch.relu(first(x[batch])))
        nn.functional.mse_loss(out, y[batch]).backward()
        trainer.step()
    assert callback.sparse_trainer.steps == 20
    assert callback.sparse_trainer.updates == trainer.updates
    assert trainer.updates
    for layer, copy in zip(layers, [first, second], strict=True):
        assert layer.pattern == copy.pattern
        torch.testing.assert_close(layer.values.value, copy.values, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(layer.bias.value, copy.bias, rtol=1e-9, atol=1e-12)
        assert tuple(layer.values.shape) == tuple(copy.values.shape)


@pytest.mark.parametrize("name", ["rigl", "snfs", "mest", "gmp"])
def test_accumulated_batches_equal_a_larger_batch(name):
    density = BY_NAME[name].first_density(0.3)
    models = [
        network(density, block_size=blocks(name), optimizer=keras.optimizers.SGD(
            0.1, momentum=0.9, gradient_accumulation_steps=batches
        ))
        for batches in (None, 4)
    ]  # fmt: skip
    x, y = numbers(40, 12), numbers(40, 4, seed=1)
    for model, size in zip(models, (8, 2), strict=True):
        callback = sparse.CALLBACKS[BY_NAME[name].trainer.__name__](**options(name))
        model.fit(x, y, batch_size=size, epochs=4, shuffle=False, verbose=0, callbacks=callback)
        assert callback.sparse_trainer.steps == 20
        assert callback.sparse_trainer.updates
    for layer, other in zip(*(model.layers for model in models), strict=True):
        if isinstance(layer, sparse.SparseDense):
            assert layer.pattern == other.pattern
            torch.testing.assert_close(
                layer.values.value, other.values.value, rtol=1e-9, atol=1e-12
            )


def test_infinite_gradient_of_any_accumulated_batch_raises():
    model = network(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    x, y = numbers(40, 12), numbers(40, 4, seed=1)
    x[0] = np.inf
    with pytest.raises(ValueError, match="NaN or infinity"):
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0,
                  callbacks=sparse.RigL(update_interval=1, total_steps=20))  # fmt: skip


class Exact(keras.layers.Dense):
    """A Dense layer in exact float64; Keras' own computes in float32."""

    def call(self, x):
        return self.activation(x @ self.kernel.value + self.bias.value)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_equals_masked_dense_layers_step_by_step(optimizer):
    model = network(optimizer=OPTIMIZERS[optimizer]())
    twin = keras.Sequential([keras.Input((12,), dtype="float64"), Exact(16, "relu"), Exact(4)])
    layers = [model.layers[0], model.layers[2]]

    def kernels():
        return [layer.to_dense().detach().clone() for layer in layers]

    def masks():
        return [layer.pattern.to_mask().t() for layer in layers]

    for layer, kernel in zip(twin.layers, kernels(), strict=True):
        layer.kernel.assign(kernel)
    twin.compile(OPTIMIZERS[optimizer](), "mse")
    twin.optimizer.build(twin.trainable_variables)
    steps = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            steps.append(masks())

        def on_train_batch_end(self, batch, logs=None):
            steps[-1] = (steps[-1], masks(), kernels())

    callback = sparse.RigL(update_interval=3, drop_fraction=0.4)
    fit(model, callback, Look())
    assert callback.sparse_trainer.updates > 2

    x, y = torch.tensor(numbers(40, 12)), torch.tensor(numbers(40, 4, seed=1))
    for step, (before, after, found) in enumerate(steps):
        batch = slice(4 * (step % 10), 4 * (step % 10) + 4)
        twin.zero_grad()
        nn.functional.mse_loss(twin(x[batch]), y[batch]).backward()
        grads = [v.value.grad for v in twin.trainable_variables]
        for place, mask in zip((0, 2), before, strict=True):
            grads[place] *= mask
        with torch.no_grad():
            twin.optimizer.apply(grads, twin.trainable_variables)
        for layer, mask in zip(twin.layers, after, strict=True):
            layer.kernel.assign(layer.kernel.value * mask)
            path = layer.kernel.path.replace("/", "_")
            slots = [v for v in twin.optimizer.variables if v.name.startswith(path)]
            assert slots
            for slot in slots:
                slot.assign(slot.value * mask)
        for layer, kernel in zip(twin.layers, found, strict=True):
            torch.testing.assert_close(layer.kernel.value, kernel, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["rigl", "gmp"])
def test_steps_per_execution_is_exact(name):
    made = sparse.CALLBACKS[BY_NAME[name].trainer.__name__]
    density = BY_NAME[name].first_density(0.3)
    calls = []

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            calls.append(batch)

    single, many = network(density), network(density, steps_per_execution=5)
    x, y = numbers(40, 12), numbers(40, 4, seed=1)
    validation = {"validation_data": (x, y)}
    one = fit(single, made(**options(name)), **validation)
    five = fit(many, made(**options(name)), Count(), **validation)
    assert calls == [4, 9, 4, 9]
    equal(single, many)
    assert one.history.keys() == five.history.keys()
    for key in ("loss", "val_loss", "sparse/density"):
        assert one.history[key] == five.history[key]
    np.testing.assert_array_equal(
        single.predict(x, batch_size=8, verbose=0), many.predict(x, batch_size=8, verbose=0)
    )
    assert single.evaluate(x, y, batch_size=8, verbose=0) == many.evaluate(
        x, y, batch_size=8, verbose=0
    )


def test_averages_and_accumulators_follow_the_pattern():
    optimizer = keras.optimizers.Adagrad(
        0.1, initial_accumulator_value=0.25, use_ema=True, ema_momentum=0.5
    )
    model = network(optimizer=optimizer)
    layer = model.layers[0]
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            callback.sparse_trainer.on_update.append(self.look)

        def look(self, step, rewirings):
            grown = rewirings["1"].grown
            seen.append(len(grown))
            index = model.trainable_variables.index(layer.values)
            assert (optimizer._accumulators[index].value[grown] == 0.25).all()
            assert not optimizer._model_variables_moving_average[index].value[grown].any()

    callback = sparse.RigL(update_interval=3)
    fit(model, callback, Look())
    assert sum(seen) > 0


def test_best_weights_are_restored_with_their_pattern():
    model = network()
    best = {}

    class Remember(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                best["kernels"] = [model.layers[i].to_dense().detach().clone() for i in (0, 2)]
                best["patterns"] = [model.layers[i].pattern for i in (0, 2)]

    stopping = keras.callbacks.EarlyStopping(
        "loss", mode="max", patience=2, restore_best_weights=True
    )
    stopping.set_model(model)
    fit(model, sparse.RigL(update_interval=3), Remember(), stopping, epochs=6)
    assert stopping.stopped_epoch == 2
    for i, kernel, pattern in zip((0, 2), best["kernels"], best["patterns"], strict=True):
        assert model.layers[i].pattern == pattern
        torch.testing.assert_close(model.layers[i].to_dense(), kernel, rtol=0, atol=0)


def test_growth_by_telemetry_and_history():
    model = network(dtype="float32")
    history = fit(model, sparse.RigL(update_interval=3)).history
    assert history["sparse/density"][0] == pytest.approx(0.3, abs=0.05)
    other = network(dtype="float32")
    assert (
        "sparse/density" not in fit(other, sparse.RigL(update_interval=3, telemetry=False)).history
    )


def test_frozen_layers_keep_their_pattern():
    model = network()
    model.layers[0].trainable = False
    model.compile("adam", "mse")
    before = model.layers[0].pattern, model.layers[2].pattern
    fit(model, sparse.SET(update_interval=3, seed=0))
    assert model.layers[0].pattern == before[0]
    assert model.layers[2].pattern != before[1]


def test_new_callback_after_an_interrupt_is_active():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    model = network()
    first, second = sparse.RigL(update_interval=3), sparse.RigL(update_interval=3)
    with pytest.raises(KeyboardInterrupt):
        fit(model, first, Stop())
    fit(model, second)
    assert (first.sparse_trainer.steps, second.sparse_trainer.steps) == (1, 20)
    fit(model)  # and without one Keras goes alone
    assert second.sparse_trainer.steps == 20


REFUSED = {
    "no sparse layers": (lambda: dense_network(), {}, ValueError, "no sparse layers"),
    "scaled": (
        lambda: network(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())),
        {},
        ValueError,
        "mixed_bfloat16",
    ),
    "scaled too": (
        lambda: network(optimizer=keras.optimizers.SGD(loss_scale_factor=8.0)),
        {},
        ValueError,
        "mixed_bfloat16",
    ),
    "muon": (lambda: network(optimizer=keras.optimizers.Muon()), {}, TypeError, "Muon"),
    "compiled": (lambda: network(jit_compile=True), {}, ValueError, "jit_compile"),
    "no steps": (lambda: network(), {"update_interval": 100}, None, "never changes"),
}


def dense_network():
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("case", list(REFUSED))
def test_unsupported_settings_raise(case):
    make, given, error, words = REFUSED[case]
    callback = sparse.RigL(**given)
    if error is None:
        with pytest.warns(UserWarning, match=words):
            fit(make(), callback)
        return
    model = make()
    with pytest.raises(error, match=words) as told:
        fit(model, callback)
    assert "\n" not in str(told.value)
    assert "apply" not in vars(model.optimizer)


@pytest.mark.parametrize("backend", ["numpy", "tensorflow"])
def test_other_backends_raise(backend):
    code = "import dynsparse.integrations.keras"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: dynsparse.integrations.keras needs Keras on torch")
    assert "KERAS_BACKEND=torch" in last
