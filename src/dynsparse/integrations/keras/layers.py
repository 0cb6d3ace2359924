"""Sparse layers of Keras: `SparseDense` and `SparseConv2D`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dynsparse._core.checks import check_integer, check_types
from dynsparse.integrations.keras.optimizer import KerasOptimizer, update_shape
from dynsparse.nn import SparseConv2d, SparseLinear
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.training.optimizer_state import StateHolders, prepare_tensors, state_entries

_STATE_KEY = "training"


class SavedState:
    """The state of a sparse training, saved with a layer because Keras does not save callbacks.

    Attributes:
        state: returns the state to save; None without a training.
        loaded: the state of the file that was loaded last, until a training restores it.
    """

    def __init__(self) -> None:
        self.state: Callable[[], dict[str, Any]] | None = None
        self.loaded: dict[str, Any] | None = None

    def save(self, store: Any) -> None:
        """Add the state to the stored entries of the layer."""
        state = self.loaded if self.state is None else self.state()
        if state is not None:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            store[_STATE_KEY] = np.frombuffer(buffer.getvalue(), np.uint8)

    def read(self, store: Any) -> Callable[[], None]:
        """Read the stored state; the returned function sets it.

        Raises:
            ValueError: it is damaged.
        """
        state = _decode(np.array(store[_STATE_KEY])) if _STATE_KEY in set(store.keys()) else None

        def set_loaded() -> None:
            self.loaded = state

        return set_loaded


def _decode(stored: np.ndarray) -> dict[str, Any]:
    try:
        content = stored.astype(np.uint8, casting="equiv").tobytes()
        state = torch.load(io.BytesIO(content), weights_only=True)
        if not isinstance(state, dict) or set(state) != {"trainer", "random"}:
            raise ValueError("expected the entries trainer and random")
    except Exception as error:  # torch.load raises several classes
        raise ValueError(f"the state of the sparse training in the file is damaged: {error}") from (
            None
        )
    return state


class PatternVariable(keras.Variable):
    """A layer's pattern as a Keras variable [2, blocks], for code that reads and restores weights:
    early stopping, `get_weights`, `set_weights`.

    It is a view of the layer. Assigning a pattern keeps the values slot by slot, because the values
    are assigned separately.
    """

    def __init__(self, sparse: SparseLinear) -> None:
        self._sparse = sparse
        self.optimizer: KerasOptimizer | None = None
        super().__init__("zeros", (), "int32", trainable=False, autocast=False, name="pattern")

    @property
    def shape(self) -> tuple[int, ...]:
        return (2, self._sparse.pattern.nnz)

    @property
    def ndim(self) -> int:
        return 2

    @property
    def value(self) -> Tensor:
        return torch.stack([self._sparse.rows, self._sparse.cols])

    def _direct_assign(self, value: Tensor) -> None:
        shape, block_size = self._sparse.pattern.shape, self._sparse.pattern.block_size
        pattern = SparsePattern._from_slot_coordinates(
            *value.cpu(), shape=shape, block_size=block_size
        )
        self.set_pattern(pattern, self._sparse.values.detach().clone())

    def set_pattern(self, pattern: SparsePattern, values: Tensor) -> None:
        """Set a pattern with its values; the state of the optimizer follows, if there is one."""
        rewiring = Rewiring.between(self._sparse.pattern, pattern)
        self._sparse.resizable |= not rewiring.keeps_size
        parameter = self._sparse.values
        follow = (
            prepare_tensors(
                state_entries(StateHolders.of(self.optimizer), parameter, rewiring), rewiring
            )
            if self.optimizer is not None and parameter in self.optimizer.state
            else None
        )
        self._sparse.set_pattern(pattern, values)
        if follow is not None:
            follow()


REGULARIZERS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


class SparseLayer(keras.layers.Layer):
    """Base class of `SparseDense` and `SparseConv2D`.

    Attributes:
        sparse: the `SparseLinear` or `SparseConv2d` that computes, once the layer is built; its
            `pattern` may be changed.
        values: the Keras variable of its non-zero weights [blocks] or [blocks, b, b].
        bias: the Keras variable [outputs], or None.
        saved_state: the state of the sparse training in files of the model.
    """

    sparse: SparseLinear
    trainable: Any

    @check_types
    def __init__(
        self,
        outputs: tuple[str, int],
        activation: Any = None,
        *,
        density: float = 0.1,
        block_size: int = 1,
        use_bias: bool = True,
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        bias_constraint: Any = None,
        seed: int | None = None,
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
                "kernel_regularizer must be L1, L2 or L1L2, which are sums over single weights, "
                f"got {type(self.kernel_regularizer).__name__}"
            )
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.seed = None if seed is None else check_integer("seed", seed)
        self.saved_state = SavedState()
        self._blocks: int | None = None
        self._resizable = False

    def _matrix_shape(self, channels: int) -> tuple[int, int]:
        """Shape [out, in] of the pattern's matrix."""
        raise NotImplementedError

    def _make_sparse(self, channels: int, **start: Any) -> SparseLinear:
        """Create the layer that computes."""
        raise NotImplementedError

    def _channels(self, shape: Sequence[int | None]) -> int:
        """Number of input channels of an x of this shape."""
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
        sparse = self._make_sparse(
            channels, bias=self.use_bias, generator=generator, dtype=dtype, **start
        )
        sparse.resizable = self._resizable
        self.add_module("sparse", sparse)

        # Keras calls these when it creates the tensors of its variables, possibly later.
        def values(*_: Any, **__: Any) -> Tensor:
            return _to_keras_device(sparse).values

        def bias(shape: Any, dtype: Any = None) -> Tensor:
            with torch.no_grad():
                sparse.bias.copy_(initial(shape, dtype=dtype))
            return _to_keras_device(sparse).bias

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
                variable.trainable = False  # updates the Parameter
        # Bypasses Keras' tracking of attributes, which would keep a copy.
        self.__dict__["_pattern"] = PatternVariable(sparse)

    @property
    def pattern(self) -> SparsePattern:
        """Which blocks of the matrix are present."""
        return self.sparse.pattern

    @property
    def weights(self) -> list[Any]:
        """The variables and the pattern, without which the values have no meaning."""
        variables = super().weights
        return [*variables, self.__dict__["_pattern"]] if self.built else variables

    def follow(self, optimizer: KerasOptimizer | None) -> None:
        """Let the state of `optimizer` follow patterns that Keras assigns; None stops it."""
        self.__dict__["_pattern"].optimizer = optimizer

    def update_shapes(self) -> None:
        """Update the shape of the variable after the number of blocks has changed."""
        update_shape(self.values)

    def call(self, x: Tensor) -> Tensor:
        """The activation of the product and the bias."""
        if x.is_meta:  # Keras computes shapes
            y = x.new_empty(self.compute_output_shape(tuple(x.shape)))
        else:
            mixed = self.compute_dtype != self.variable_dtype
            dtype = getattr(torch, self.compute_dtype)
            with torch.autocast(x.device.type, dtype) if mixed else nullcontext():
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
        """Save values, rows, columns, bias, and the state of the training."""
        if not self.built:
            return
        store["rows"] = self.pattern.rows.numpy()
        store["cols"] = self.pattern.cols.numpy()
        store["values"] = keras.ops.convert_to_numpy(self.values)
        if self.bias is not None:
            store["bias"] = keras.ops.convert_to_numpy(self.bias)
        self.saved_state.save(store)

    def load_own_variables(self, store: Any) -> None:
        """Load the entries of `save_own_variables`, or raise an error and change nothing."""
        names = set(store.keys())
        required = {"rows", "cols", "values"} | ({"bias"} if self.use_bias else set())
        if not self.built or not required <= names:
            raise ValueError(
                f"layer {self.name!r}: expected {', '.join(sorted(required))} in the file, got "
                f"{', '.join(sorted(names)) or 'nothing'}"
            )
        rows, cols = (torch.from_numpy(np.array(store[name])) for name in ("rows", "cols"))
        pattern = SparsePattern._from_slot_coordinates(
            rows, cols, shape=self.pattern.shape, block_size=self.block_size
        )
        values = _to_tensor(store["values"], self.values)
        pattern._check_values(values)
        variable: Any = self.bias
        bias = None if variable is None else _to_tensor(store["bias"], variable)
        set_saved_state = self.saved_state.read(store)
        if variable is not None:
            variable.assign(bias)
        self.__dict__["_pattern"].set_pattern(pattern, values)
        self.update_shapes()
        set_saved_state()


def _to_keras_device(sparse: SparseLinear) -> SparseLinear:
    """Move the layer to the device of Keras; unchanged while Keras only computes shapes."""
    device = keras.ops.zeros(()).device
    return sparse if device.type == "meta" else sparse.to(device)


def _to_tensor(entry: Any, like: Any) -> Tensor:
    return keras.ops.convert_to_tensor(np.array(entry), dtype=like.dtype)


@keras.saving.register_keras_serializable("dynsparse")
class SparseDense(SparseLayer):
    """`keras.layers.Dense` that stores only the present blocks of the kernel.

    Its attribute `sparse` is a `dynsparse.nn.SparseLinear`, which computes, shares its Parameters
    and initialises the values.

    Args:
        units: outputs.
        activation: as in `Dense`.
        options: `density`, fraction of the blocks that are present, in (0, 1], by default 0.1;
            `block_size`, edge of the square blocks, which must divide inputs and units, by default
            1; `use_bias`, `bias_initializer`, `bias_regularizer`, `bias_constraint` as in `Dense`;
            `kernel_regularizer`, L1, L2 or L1L2, over the present weights; `seed` for pattern and
            values, by default torch's global generator draws them; `name`, `dtype`, `trainable`,
            `activity_regularizer` and other options of layers.

    Raises:
        TypeError, ValueError: units below 1; when built, a density outside (0, 1], or a block size
            that does not divide the layer.
    """

    def __init__(self, units: int, activation: Any = None, **options: Any) -> None:
        super().__init__(("units", units), activation, **options)
        self.units = units
        self.input_spec = keras.layers.InputSpec(min_ndim=2)
        self.supports_masking = True

    def _channels(self, shape: Sequence[int | None]) -> int:
        inputs = check_integer("the last dimension of the input", shape[-1], 1)
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: inputs})
        return inputs

    def _matrix_shape(self, channels: int) -> tuple[int, int]:
        return self.units, channels

    def _make_sparse(self, channels: int, **start: Any) -> SparseLinear:
        return SparseLinear(channels, self.units, **start)

    def to_dense(self) -> Tensor:
        """The kernel as `Dense` has it, [inputs, units]."""
        return self.sparse.to_dense().t()

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        return (*input_shape[:-1], self.units)

    def get_config(self) -> dict[str, Any]:
        return {"units": self.units} | super().get_config()


@keras.saving.register_keras_serializable("dynsparse")
class SparseConv2D(SparseLayer):
    """`keras.layers.Conv2D` that stores only the present blocks of the kernel.

    A block covers `block_size` filters times as many input channels of one tap of the kernel; see
    `dynsparse.nn.SparseConv2d`, which computes and is the attribute `sparse`.

    Args:
        filters, kernel_size, strides, padding, data_format, dilation_rate, groups: as in `Conv2D`;
            the default data format of Keras is "channels_last".
        activation: as in `Conv2D`.
        options: see `SparseDense`; the block size must divide the filters and the channels of a
            group.

    Raises:
        TypeError, ValueError: as `SparseDense` and `Conv2D`.
    """

    def __init__(
        self,
        filters: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] = (1, 1),
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: int | Sequence[int] = (1, 1),
        groups: int = 1,
        activation: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(("filters", filters), activation, **options)
        self.filters, self.groups = filters, check_integer("groups", groups, 1)
        # A dense layer, never built, checks the other options and computes output shapes.
        dense = self._make_dense(
            _as_pair("kernel_size", kernel_size),
            _as_pair("strides", strides),
            padding,
            data_format,
            _as_pair("dilation_rate", dilation_rate),
        )
        self.kernel_size, self.strides = dense.kernel_size, dense.strides
        self.padding, self.data_format = dense.padding, dense.data_format
        self.dilation_rate = dense.dilation_rate
        self.input_spec = keras.layers.InputSpec(ndim=4)

    def _make_dense(self, *options: Any) -> Any:
        kernel_size, strides, padding, data_format, dilation_rate = options
        return keras.layers.Conv2D(
            self.filters,
            kernel_size,
            strides=strides,
            padding=padding,
            data_format=data_format,
            dilation_rate=dilation_rate,
            groups=self.groups,
        )

    @property
    def _channels_last(self) -> bool:
        return self.data_format == "channels_last"

    def _channels(self, shape: Sequence[int | None]) -> int:
        axis = -1 if self._channels_last else 1
        channels = check_integer("the channels of the input", shape[axis], 1)
        self.input_spec = keras.layers.InputSpec(ndim=4, axes={axis: channels})
        return channels

    def _matrix_shape(self, channels: int) -> tuple[int, int]:
        return self.filters, self.kernel_size[0] * self.kernel_size[1] * channels // self.groups

    def _make_sparse(self, channels: int, **start: Any) -> SparseLinear:
        return SparseConv2d(
            channels,
            self.filters,
            self.kernel_size,
            self.strides,
            "same" if self._is_symmetric else 0,
            self.dilation_rate,
            self.groups,
            **start,
        )

    @property
    def _is_symmetric(self) -> bool:
        """Whether the padding is the same for every input size."""
        return self.padding == "same" and tuple(self.strides) == (1, 1)

    def _product(self, x: Tensor) -> Tensor:
        if self._channels_last:
            x = x.permute(0, 3, 1, 2)
        if self.padding == "same" and not self._is_symmetric:
            padding: list[int] = []
            for n, k, s, d in zip(
                x.shape[2:], self.kernel_size, self.strides, self.dilation_rate, strict=True
            ):
                more = max((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, 0)
                padding = [more // 2, more - more // 2, *padding]
            x = functional.pad(x, padding)
        y = self.sparse(x)
        return y.permute(0, 2, 3, 1) if self._channels_last else y

    def to_dense(self) -> Tensor:
        """The kernel as `Conv2D` has it, [height, width, channels / groups, filters]."""
        return self.sparse.to_dense().permute(2, 3, 1, 0)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        dense = self._make_dense(
            self.kernel_size, self.strides, self.padding, self.data_format, self.dilation_rate
        )
        return tuple(dense.compute_output_shape(input_shape))

    def get_config(self) -> dict[str, Any]:
        return {
            "filters": self.filters,
            "kernel_size": self.kernel_size,
            "strides": self.strides,
            "padding": self.padding,
            "data_format": self.data_format,
            "dilation_rate": self.dilation_rate,
            "groups": self.groups,
        } | super().get_config()


def _as_pair(name: str, value: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(value, (list, tuple)) and len(value) == 2:
        return tuple(check_integer(name, n, 1) for n in value)
    return (check_integer(f"{name}, or each of its two,", value, 1),) * 2
