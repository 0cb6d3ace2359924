"""Resuming a training from files that Keras writes is exact."""

import numpy as np
import pytest
from keras_networks import KINDS, blocks, equal, fit, keras, network, options, same_bits, sparse

from dynsparse.training.algorithms import BY_NAME

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("keras_of_float64")]


@pytest.mark.parametrize("name", KINDS)
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


def test_resume_from_backup(tmp_path):
    """The model is created again with other layer sizes than the training has reached."""
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


def test_file_of_a_training_may_start_another(tmp_path):
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


def test_damaged_state_raises(tmp_path):
    import h5py

    model = network()
    fit(model, sparse.RigL(update_interval=3))
    path = tmp_path / "a.weights.h5"
    model.save_weights(path)
    with h5py.File(path, "r+") as file:
        found = []
        file.visit(lambda name: found.append(name) if name.endswith("/training") else None)
        assert len(found) == 1  # one layer carries it
        file[found[0]][-60:] = 255
    before = [np.array(w) for w in model.get_weights()]
    with pytest.raises(ValueError, match="damaged"):
        model.load_weights(path)
    same_bits(before, model.get_weights())
