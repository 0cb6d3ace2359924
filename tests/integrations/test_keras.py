"""Sparse training in Keras: it equals masked dense layers and a plain loop, and resumes exactly."""

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.training.algorithms import BY_NAME

os.environ.setdefault("KERAS_BACKEND", "torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    keras = pytest.importorskip("keras")
    from dynsparse.integrations import keras as sparse

pytestmark = pytest.mark.filterwarnings("default")

OPTIONS = {
    name: {"seed": 3} if "seed" in algorithm.arguments else {}
    for name, algorithm in BY_NAME.items()
}
TIMED = {name: {"update_interval": 3} for name in BY_NAME if name not in ("static", "deepr")}


@pytest.fixture(autouse=True)
def _float64():
    """Learning rates and data too, which Keras casts."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")


def options(name):
    made = OPTIONS[name] | TIMED.get(name, {})
    if "total_steps" in BY_NAME[name].arguments:
        made["total_steps"] = 20
    if "final_density" in BY_NAME[name].arguments:
        made["final_density"] = 0.2
    return made


def blocks(name):
    """Those that move blocks between layers want one size."""
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


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("name", list(BY_NAME))
def test_it_equals_a_plain_loop(name):
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
    assert trainer.updates or name == "static"
    for layer, copy in zip(layers, [first, second], strict=True):
        assert layer.pattern == copy.pattern
        torch.testing.assert_close(layer.values.value, copy.values, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(layer.bias.value, copy.bias, rtol=1e-9, atol=1e-12)
        assert tuple(layer.values.shape) == tuple(copy.values.shape)


class Exact(keras.layers.Dense):
    """Keras' own product of float64 is one of float32."""

    def call(self, x):
        return self.activation(x @ self.kernel.value + self.bias.value)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_it_equals_masked_dense_layers_step_by_step(optimizer):
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


@pytest.mark.parametrize("name", list(BY_NAME))
def test_resuming_from_a_keras_file_is_exact(name, tmp_path):
    made = sparse.CALLBACKS[BY_NAME[name].trainer.__name__]
    given = options(name) | ({"total_steps": 40} if "total_steps" in options(name) else {})
    density = BY_NAME[name].first_density(0.3)

    def start():
        made = {"dropout": 0.2, "dtype": "float32", "optimizer": "adam"}
        return network(density, block_size=blocks(name), **made)

    whole, half = start(), start()
    fit(whole, made(**given), epochs=4, shuffle=True)
    half = start()
    fit(half, made(**given), shuffle=True)
    half.save(tmp_path / "half.keras")
    keras.utils.set_random_seed(99)
    resumed = keras.saving.load_model(tmp_path / "half.keras")
    equal(resumed, half)
    callback = made(**given)
    fit(resumed, callback, epochs=4, initial_epoch=2, shuffle=True)
    assert callback.sparse_trainer.steps == 40
    equal(resumed, whole)


def test_a_backup_is_resumed_from(tmp_path):
    """The model is made anew, with other sizes than those to which the training has come."""
    whole = network(1.0, dropout=0.2, optimizer="adam")
    given = {"total_steps": 40, "update_interval": 3, "final_density": 0.2}
    fit(whole, sparse.GMP(**given), epochs=4, shuffle=True)

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path)

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(network(1.0, dropout=0.2, optimizer="adam"), sparse.GMP(**given), backup(), Stop(),
            epochs=4, shuffle=True)  # fmt: skip
    again = network(1.0, seed=99, dropout=0.2, optimizer="adam")
    callback = sparse.GMP(**given)
    fit(again, callback, backup(), epochs=4, shuffle=True)
    assert callback.sparse_trainer.steps == 40
    equal(again, whole)


def test_a_file_that_held_a_training_may_begin_another(tmp_path):
    model = network()
    fit(model, sparse.RigL(update_interval=3))
    model.save(tmp_path / "a.keras")
    again = keras.saving.load_model(tmp_path / "a.keras")
    again.save(tmp_path / "b.keras")  # unused, the training travels on
    again = keras.saving.load_model(tmp_path / "b.keras")
    with pytest.raises(ValueError, match="does not fit"):
        fit(again, sparse.SET(update_interval=5))
    callback = sparse.SET(update_interval=5, resume=False)
    fit(again, callback)
    assert callback.sparse_trainer.steps == 20


def test_a_damaged_state_is_refused(tmp_path):
    import h5py

    model = network()
    fit(model, sparse.RigL(update_interval=3))
    path = tmp_path / "a.weights.h5"
    model.save_weights(path)
    with h5py.File(path, "r+") as file:
        found = []
        file.visit(lambda name: found.append(name) if name.endswith("/training") else None)
        assert len(found) == 1  # one layer carries it
        file[found[0]][40:60] = 255
    before = [np.array(w) for w in model.get_weights()]
    with pytest.raises(ValueError, match="damaged"):
        model.load_weights(path)
    same_bits(before, model.get_weights())


@pytest.mark.parametrize("name", ["rigl", "gmp"])
def test_many_steps_for_one_call_give_the_same_bits(name):
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


def test_averages_and_accumulators_follow():
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


def test_after_an_interrupt_the_next_callback_leads():
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
    "accumulating": (
        lambda: network(optimizer=keras.optimizers.SGD(gradient_accumulation_steps=2)),
        {},
        ValueError,
        "gradient_accumulation_steps=2",
    ),
}


def dense_network():
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_cannot_follow_is_refused(case):
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
def test_another_backend_gets_a_line(backend):
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
def test_a_convolution_computes_what_keras_own_does(given):
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


def test_a_functional_model_becomes_sparse_in_place(capsys, tmp_path):
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


def test_a_subclassed_model_becomes_sparse_in_place():
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


def test_nothing_changes_where_sparsify_refuses():
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


def test_layers_are_made_anew_from_their_configuration():
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
def test_wrong_options_get_a_line(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()
