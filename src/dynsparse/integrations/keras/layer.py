"""What sparse layers of Keras have in common."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynsparse.checks import check_integer
from dynsparse.integrations.keras.following import KerasOptimizer, resized
from dynsparse.integrations.keras.library import keras
from dynsparse.integrations.keras.passenger import Passenger
from dynsparse.integrations.keras.pattern_variable import PatternVariable
from dynsparse.nn import SparseLinear
from dynsparse.pattern import SparsePattern
from dynsparse.typed import typed

__all__ = ["REGULARIZERS", "SparseLayer"]

REGULARIZERS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


class SparseLayer(keras.layers.Layer):
    """What `SparseDense` and `SparseConv2D` have in common.

    Attributes:
        sparse: the `SparseLinear` or `SparseConv2d` that computes, once the layer is built; its
            `pattern` may be changed as ever.
        values: Keras' variable of its non-zero weights [blocks] or [blocks, b, b].
        bias: Keras' variable [outputs], or None.
        passenger: what files of the model hold for the sparse training under way.
    """

    sparse: SparseLinear
    trainable: Any

    @typed
    def __init__(
        self,
        outputs: tuple[str, int],
        *,
        density: float,
        block_size: int,
        activation: Any,
        use_bias: bool,
        bias_initializer: Any,
        kernel_regularizer: Any,
        bias_regularizer: Any,
        bias_constraint: Any,
        seed: int | None,
        **named: Any,
    ) -> None:
        super().__init__(**named)
        check_integer(*outputs, 1)
        self.density, self.block_size = density, check_integer("block_size", block_size, 1)
        self.activation = keras.activations.get(activation)
        self.use_bias = bool(use_bias)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        if not isinstance(self.kernel_regularizer, (type(None), *REGULARIZERS)):
            raise ValueError(
                "kernel_regularizer must be L1, L2 or L1L2, which look at each weight by itself, "
                f"got {type(self.kernel_regularizer).__name__}"
            )
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.seed = None if seed is None else check_integer("seed", seed)
        self.passenger = Passenger()
        self._blocks: int | None = None
        self._resizable = False

    def _matrix_shape(self, channels: int) -> tuple[int, int]:
        """Of the matrix that the pattern is of."""
        raise NotImplementedError

    def _made(self, channels: int, **start: Any) -> SparseLinear:
        """The layer that is to compute, with these arguments."""
        raise NotImplementedError

    def _channels(self, shape: Sequence[int | None]) -> int:
        """The inputs of an x of this shape."""
        raise NotImplementedError

    def build(self, input_shape: Sequence[int | None]) -> None:
        channels = self._channels(input_shape)
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        start: dict[str, Any] = {"density": self.density, "block_size": self.block_size}
        if self._blocks is not None:
            start = {"pattern": SparsePattern.random(
                self._matrix_shape(channels), nnz=self._blocks, block_size=self.block_size,
                generator=generator,
            )}  # fmt: skip
        dtype = getattr(torch, self.variable_dtype)
        sparse = self._made(channels, bias=self.use_bias, generator=generator, dtype=dtype, **start)
        sparse.resizable = self._resizable
        self.add_module("sparse", sparse)

        # Keras calls these when its variables get their tensors, which may be later.
        def values(*_: Any, **__: Any) -> Tensor:
            return _at_home(sparse).values

        def bias(shape: Any, dtype: Any = None) -> Tensor:
            with torch.no_grad():
                sparse.bias.copy_(initial(shape, dtype=dtype))
            return _at_home(sparse).bias

        initial = self.bias_initializer
        self.values = self.add_weight(
            name="values",
            shape=tuple(sparse.values.shape),
            initializer=values,
            regularizer=self.kernel_regularizer,
        )
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=tuple(sparse.bias.shape),
                initializer=bias,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )
        for variable in (self.values, self.bias):
            if variable is not None and not self.trainable:
                variable.trainable = False  # the Parameter hears of it now
        # Not an attribute as others: what is tracked would keep a copy.
        self.__dict__["_pattern"] = PatternVariable(sparse)

    @property
    def pattern(self) -> SparsePattern:
        """Which blocks of the matrix are present."""
        return self.sparse.pattern

    @property
    def weights(self) -> list[Any]:
        """The variables, and the pattern as one more: without it values belong nowhere."""
        found = super().weights
        return [*found, self.__dict__["_pattern"]] if self.built else found

    def follow(self, optimizer: KerasOptimizer | None) -> None:
        """Let state of `optimizer` follow the patterns that Keras puts in place; None: no more."""
        self.__dict__["_pattern"].optimizer = optimizer

    def update_shapes(self) -> None:
        """Tell Keras how long the values are, after the number of blocks has changed."""
        resized(self.values)

    def call(self, x: Tensor) -> Tensor:
        """The activation of the product and the bias."""
        if x.is_meta:  # Keras asks for shapes
            y = x.new_empty(self.compute_output_shape(tuple(x.shape)))
        else:
            mixed = self.compute_dtype != self.variable_dtype
            kind = getattr(torch, self.compute_dtype)
            with torch.autocast(x.device.type, kind) if mixed else nullcontext():
                y = self._product(x)
        return y if self.activation is None else self.activation(y)

    def _product(self, x: Tensor) -> Tensor:
        return self.sparse(x)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {
            "density": self.density,
            "block_size": self.block_size,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
            "activity_regularizer": keras.regularizers.serialize(self.activity_regularizer),
            "bias_constraint": keras.constraints.serialize(self.bias_constraint),
            "seed": self.seed,
        }

    def get_build_config(self) -> dict[str, Any] | None:
        config = super().get_build_config()
        if not config or not self.built:
            return config
        return config | {"blocks": self.pattern.nnz, "resizable": self.sparse.resizable}

    def build_from_config(self, config: dict[str, Any]) -> None:
        self._blocks = config.get("blocks")
        self._resizable = bool(config.get("resizable", False))
        super().build_from_config(config)

    def save_own_variables(self, store: Any) -> None:
        """Values, their rows and columns, the bias, and what travels with them."""
        if not self.built:
            return
        store["rows"] = self.pattern.rows.numpy()
        store["cols"] = self.pattern.cols.numpy()
        store["values"] = keras.ops.convert_to_numpy(self.values)
        if self.bias is not None:
            store["bias"] = keras.ops.convert_to_numpy(self.bias)
        self.passenger.save(store)

    def load_own_variables(self, store: Any) -> None:
        """All of it, or an error and nothing."""
        names = set(store.keys())
        wanted = {"rows", "cols", "values"} | ({"bias"} if self.use_bias else set())
        if not self.built or not wanted <= names:
            raise ValueError(
                f"layer {self.name!r}: expected {', '.join(sorted(wanted))} in the file, got "
                f"{', '.join(sorted(names)) or 'nothing'}"
            )
        rows, cols = (torch.from_numpy(np.array(store[name])) for name in ("rows", "cols"))
        pattern = SparsePattern._in_order(
            rows, cols, shape=self.pattern.shape, block_size=self.block_size
        )
        values = _tensor(store["values"], self.values)
        pattern._check_values(values)
        own: Any = self.bias
        bias = None if own is None else _tensor(store["bias"], own)
        passenger = self.passenger.read(store)
        if own is not None:
            own.assign(bias)
        self.__dict__["_pattern"].put(pattern, values)
        self.update_shapes()
        passenger()


def _at_home(sparse: SparseLinear) -> SparseLinear:
    """On the device that Keras computes on; nowhere where it only asks for shapes."""
    device = keras.ops.zeros(()).device
    return sparse if device.type == "meta" else sparse.to(device)


def _tensor(entry: Any, like: Any) -> Tensor:
    return keras.ops.convert_to_tensor(np.array(entry), dtype=like.dtype)
