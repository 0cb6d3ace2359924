"""Sparse training in `model.fit`: one callback per algorithm."""

from __future__ import annotations

from typing import Any, ClassVar

import keras
from torch import nn

from dynsparse._core.checks import check_flag
from dynsparse.integrations.follower import Algorithm, Follower
from dynsparse.integrations.keras.convert import enable_many_steps
from dynsparse.integrations.keras.layers import SavedState, SparseLayer
from dynsparse.integrations.keras.optimizer import KerasOptimizer
from dynsparse.ranks import check_consistent
from dynsparse.training import SparseTrainer
from dynsparse.training.algorithms import BY_NAME
from dynsparse.training.checkpoint import random_state


class SparseCallback(keras.callbacks.Callback):
    """Pattern updates after the optimizer's steps, and exact resume from Keras' files.

        model.fit(x, y, callbacks=[SparseCallback(ds.RigL, update_interval=100)])

    The model needs sparse layers (`SparseDense`, `SparseConv2D`, `sparsify`). The state that the
    Keras optimizer has for each weight, such as momenta and averages, follows the pattern. During
    and after training, all files of the model (`model.save`, `save_weights`, `ModelCheckpoint`,
    `BackupAndRestore`) contain the state of the sparse trainer and the global random generators; a
    model loaded from them continues bit for bit.

    Where `torch.distributed` is initialised, as in a program that torchrun starts, training is data
    parallel: every rank calls `fit` with the same number of samples of its own, begins with the
    weights of the first rank, and steps with the average gradient. Make the model with the same
    seed on every rank (`keras.utils.set_random_seed`), or load the same file. Metrics are those of
    a rank's samples. The option `ranks=None` trains every rank by itself.

    Args:
        algorithm: `ds.RigL` or another trainer class, or a function of (model, optimizer) that
            returns a trainer. Layers are named by their index in the model: "0", or "2.1" inside of
            a model with index 2.
        resume: whether to continue the training in the file of a loaded model.
        restore_random_state: whether to restore the global random generators on resuming.
        telemetry: whether to add the figures of `Telemetry` for all layers together
            ("sparse/density", "sparse/churn", ...) to the logs of every epoch.
        options: keyword arguments of the algorithm. Steps are those of the optimizer: with
            `gradient_accumulation_steps=n`, one for every n batches. `total_steps` defaults to all
            steps of `fit` if no schedule is given.

    Attributes:
        sparse_trainer: the `SparseTrainer` of the current or last training, with the list of hooks
            `on_update` and the count `updates`.

    Raises:
        TypeError, ValueError: when training begins: a model without sparse layers, or compiled with
            `jit_compile`; an unsupported optimizer (Muon, scaled losses); a state that does not
            fit; arguments that the algorithm refuses; other patterns or another number of batches
            on another rank.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        resume: bool = True,
        restore_random_state: bool = True,
        telemetry: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self._follower = Follower(algorithm, options, telemetry)
        self._resume = check_flag("resume", resume)
        self._restores = check_flag("restore_random_state", restore_random_state)
        self._optimizer: Any = None
        self._layers: dict[str, SparseLayer] = {}

    @property
    def sparse_trainer(self) -> SparseTrainer | None:
        return self._follower.trainer

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        enable_many_steps(model)

    def on_train_begin(self, logs: Any = None) -> None:
        model = self.model
        if model.jit_compile is True:
            raise ValueError(
                "expected a model that is not compiled by torch, whose patterns change between "
                "steps, got jit_compile=True: leave it out of model.compile()"
            )
        layers = find_sparse_layers(model)
        if not layers:
            raise ValueError(
                "the model has no sparse layers: use SparseDense, SparseConv2D, or sparsify(model)"
            )
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self._layers = layers
        self._optimizer = KerasOptimizer(model.optimizer)
        try:
            self._start(self._loaded_state() if self._resume else None)
        except BaseException:
            self._optimizer.release()
            raise

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        state = self._loaded_state()
        if state is not None:  # another callback has loaded a file
            self._start(state)

    def _loaded_state(self) -> dict[str, Any] | None:
        """The state in the file that was loaded last, or None."""
        return next((p.loaded for p in self._saved_states if p.loaded is not None), None)

    @property
    def _saved_states(self) -> list[SavedState]:
        return [layer.saved_state for layer in self._layers.values()]

    def _start(self, state: dict[str, Any] | None) -> None:
        """Create the trainer and restore `state`, if any."""
        layers, optimizer = self._layers, self._optimizer
        self._follower.stop()
        if state is not None:
            self._follower.load_state_dict(state["trainer"])
        epochs, steps = self.params["epochs"], self.params["steps"]
        total = None if steps is None else epochs * steps // optimizer.batches
        trainer = self._follower.start(_to_module(layers), optimizer, total)
        optimizer.captures, optimizer.ranks = lambda: trainer._captures, trainer.ranks
        check_consistent(
            trainer.ranks,
            {"the number of batches in an epoch": str(steps)},
            "give every rank as many samples",
        )
        for variable in self.model.variables:
            if variable.value.is_floating_point():
                trainer.ranks.broadcast(variable.value.detach())
        if state is not None and self._restores:
            random_state.restore_global_states(state["random"])

        def update_shapes(*_: object) -> None:
            for layer in layers.values():
                layer.update_shapes()

        trainer.on_update.insert(0, update_shapes)
        update_shapes()
        for layer in layers.values():
            layer.follow(optimizer)
            layer.saved_state.loaded = layer.saved_state.state = None
        self._saved_states[0].state = self._state

    def _state(self) -> dict[str, Any]:
        return {"trainer": self._follower.state_dict(), "random": random_state.global_states()}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(self._follower.figures())

    def on_train_end(self, logs: Any = None) -> None:
        self._follower.stop()
        self._optimizer.release()


def find_sparse_layers(model: Any, prefix: str = "") -> dict[str, SparseLayer]:
    """Index in the model -> sparse layer, each once."""
    layers: dict[str, SparseLayer] = {}
    for index, layer in enumerate(model._layers):
        name = f"{prefix}.{index}" if prefix else str(index)
        inner = {name: layer} if isinstance(layer, SparseLayer) else find_sparse_layers(layer, name)
        known = {id(layer) for layer in layers.values()}
        layers |= {n: layer for n, layer in inner.items() if id(layer) not in known}
    return layers


def _to_module(layers: dict[str, SparseLayer]) -> nn.Module:
    """A torch module with the `sparse` modules of the layers, under these names."""
    root = nn.Module()
    for name, layer in layers.items():
        *parents, last = name.split(".")
        parent = root
        for part in parents:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, layer.sparse)
    return root


def _make_callback(algorithm: type[SparseTrainer]) -> type[SparseCallback]:
    """The callback for one algorithm."""

    class Callback(SparseCallback):
        __doc__ = f"""`SparseCallback` with `dynsparse.{algorithm.__name__}`: takes its arguments.

            model.fit(x, y, callbacks=[{algorithm.__name__}()])
        """
        trainer: ClassVar[type[SparseTrainer]] = algorithm

        def __init__(self, **options: Any) -> None:
            super().__init__(algorithm, **options)

    Callback.__name__ = Callback.__qualname__ = algorithm.__name__
    return Callback


CALLBACKS = {a.trainer.__name__: _make_callback(a.trainer) for a in BY_NAME.values()}
"""Name of an algorithm -> its callback."""
