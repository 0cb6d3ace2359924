"""Sparse training in `model.fit`: one callback per algorithm."""

from __future__ import annotations

from typing import Any, ClassVar

import keras
from torch import nn

from dynsparse.checks import check_flag
from dynsparse.integrations.follower import Algorithm, Follower
from dynsparse.integrations.keras.convert import many_steps
from dynsparse.integrations.keras.layers import Passenger, SparseLayer
from dynsparse.integrations.keras.optimizer import KerasOptimizer
from dynsparse.training import SparseTrainer
from dynsparse.training.algorithms import BY_NAME
from dynsparse.training.checkpoint import random_state


class SparseCallback(keras.callbacks.Callback):
    """Pattern updates after the optimizer's steps, and exact resume from Keras' files.

        model.fit(x, y, callbacks=[SparseCallback(ds.RigL, update_interval=100)])

    The model has sparse layers (`SparseDense`, `SparseConv2D`, `sparsify`). Momenta, averages of
    the weights and whatever else Keras' optimizer keeps for each weight follow the pattern. While
    and after it trains, all that Keras saves of the model (`model.save`, `save_weights`,
    `ModelCheckpoint`, `BackupAndRestore`) holds the state of the sparse trainer and the global
    random generators; a model that was loaded from there goes on with the same bits.

    Args:
        algorithm: `ds.RigL` or another trainer class, or a function of (model, optimizer) that
            returns a trainer. Its layers are named by their places among those of the model: "0",
            or "2.1" within a model in place 2.
        resume: False begins anew with a model whose file held a training.
        restore_random_state: False leaves the global random generators as they are on resuming.
        telemetry: adds to the logs of every epoch what `Telemetry` says of all layers together:
            "sparse/density", "sparse/churn" and others.
        options: the algorithm's further arguments. `total_steps` is epochs times steps unless it,
            or a schedule, is given.

    Attributes:
        sparse_trainer: the `SparseTrainer` of the training under way, or of the last; its
            `on_update` takes hooks, `updates` counts.

    Raises:
        TypeError, ValueError: when training begins: a model without sparse layers, or compiled with
            `jit_compile`; an optimizer that cannot follow (Muon, scaled losses, accumulated
            gradients); a state that does not fit, and what the algorithm refuses.
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
        many_steps(model)

    def on_train_begin(self, logs: Any = None) -> None:
        model = self.model
        if model.jit_compile is True:
            raise ValueError(
                "expected a model that is not compiled by torch, whose patterns change between "
                "steps, got jit_compile=True: leave it out of model.compile()"
            )
        layers = sparse_layers(model)
        if not layers:
            raise ValueError(
                "the model has no sparse layers: use SparseDense, SparseConv2D, or sparsify(model)"
            )
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self._layers = layers
        self._optimizer = KerasOptimizer(model.optimizer)
        try:
            self._start(self._found() if self._resume else None)
        except BaseException:
            self._optimizer.let_go()
            raise

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        found = self._found()
        if found is not None:  # another callback has loaded a file since
            self._start(found)

    def _found(self) -> dict[str, Any] | None:
        """The state that was in the file which the model comes from."""
        return next((p.found for p in self._passengers if p.found is not None), None)

    @property
    def _passengers(self) -> list[Passenger]:
        return [layer.passenger for layer in self._layers.values()]

    def _start(self, found: dict[str, Any] | None) -> None:
        """Make the trainer, which goes on from what was found."""
        layers, optimizer = self._layers, self._optimizer
        self._follower.stop()
        if found is not None:
            self._follower.load_state_dict(found["trainer"])
        epochs, steps = self.params["epochs"], self.params["steps"]
        total = None if steps is None else epochs * steps
        trainer = self._follower.start(_holder(layers), optimizer, total)
        if found is not None and self._restores:
            random_state.restore_global_states(found["random"])

        def tell(*_: object) -> None:
            for layer in layers.values():
                layer.update_shapes()

        trainer.on_update.insert(0, tell)
        tell()
        for layer in layers.values():
            layer.follow(optimizer)
            layer.passenger.found = layer.passenger.state = None
        self._passengers[0].state = self._state

    def _state(self) -> dict[str, Any]:
        return {"trainer": self._follower.state_dict(), "random": random_state.global_states()}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(self._follower.figures())

    def on_train_end(self, logs: Any = None) -> None:
        self._follower.stop()
        self._optimizer.let_go()


def sparse_layers(model: Any, place: str = "") -> dict[str, SparseLayer]:
    """place -> sparse layer, in the order of the model's layers; each once."""
    found: dict[str, SparseLayer] = {}
    for index, layer in enumerate(model._layers):
        name = f"{place}.{index}" if place else str(index)
        inner = {name: layer} if isinstance(layer, SparseLayer) else sparse_layers(layer, name)
        known = {id(one) for one in found.values()}
        found |= {where: one for where, one in inner.items() if id(one) not in known}
    return found


def _holder(layers: dict[str, SparseLayer]) -> nn.Module:
    """A module of torch with what computes the layers, under these names."""
    whole = nn.Module()
    for name, layer in layers.items():
        *above, last = name.split(".")
        inside = whole
        for part in above:
            if part not in inside._modules:
                inside.add_module(part, nn.Module())
            inside = inside.get_submodule(part)
        inside.add_module(last, layer.sparse)
    return whole


def _callback(algorithm: type[SparseTrainer]) -> type[SparseCallback]:
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


CALLBACKS = {one.trainer.__name__: _callback(one.trainer) for one in BY_NAME.values()}
"""Name of an algorithm -> its callback."""
