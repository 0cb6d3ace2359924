"""Keras' `Conv2D`, sparse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from dynsparse.checks import check_integer
from dynsparse.integrations.keras.layer import SparseLayer
from dynsparse.integrations.keras.library import keras
from dynsparse.nn import SparseConv2d, SparseLinear

__all__ = ["SparseConv2D"]


@keras.saving.register_keras_serializable("dynsparse")
class SparseConv2D(SparseLayer):
    """`keras.layers.Conv2D` of which only the present blocks of the kernel are stored.

    A block covers `block_size` filters times as many input channels of one tap of the kernel; see
    `dynsparse.nn.SparseConv2d`, which computes and is the attribute `sparse`.

    Args:
        filters, kernel_size, strides, padding, data_format, dilation_rate, groups: as in `Conv2D`;
            Keras' usual data format is "channels_last".
        activation: as in `Conv2D`.
        density, block_size, seed and what follows: see `SparseDense`; the block size must divide
            the filters and the channels of a group.

    Raises:
        TypeError, ValueError: as `SparseDense`, and what `Conv2D` refuses.
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
        super().__init__(
            ("filters", filters),
            density=density,
            block_size=block_size,
            activation=activation,
            use_bias=use_bias,
            bias_initializer=bias_initializer,
            kernel_regularizer=kernel_regularizer,
            bias_regularizer=bias_regularizer,
            bias_constraint=bias_constraint,
            seed=seed,
            **named,
        )
        self.filters, self.groups = filters, check_integer("groups", groups, 1)
        # Keras' own layer, never built, checks the rest and says what comes of a shape.
        like = self._like(
            _two("kernel_size", kernel_size),
            _two("strides", strides),
            padding,
            data_format,
            _two("dilation_rate", dilation_rate),
        )
        self.kernel_size, self.strides = like.kernel_size, like.strides
        self.padding, self.data_format = like.padding, like.data_format
        self.dilation_rate = like.dilation_rate
        self.input_spec = keras.layers.InputSpec(ndim=4)

    def _like(self, *options: Any) -> Any:
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
    def _last(self) -> bool:
        return self.data_format == "channels_last"

    def _channels(self, shape: Sequence[int | None]) -> int:
        axis = -1 if self._last else 1
        channels = check_integer("the channels of the input", shape[axis], 1)
        self.input_spec = keras.layers.InputSpec(ndim=4, axes={axis: channels})
        return channels

    def _matrix_shape(self, channels: int) -> tuple[int, int]:
        return self.filters, self.kernel_size[0] * self.kernel_size[1] * channels // self.groups

    def _made(self, channels: int, **start: Any) -> SparseLinear:
        return SparseConv2d(
            channels,
            self.filters,
            self.kernel_size,
            self.strides,
            "same" if self._same_everywhere else 0,
            self.dilation_rate,
            self.groups,
            **start,
        )

    @property
    def _same_everywhere(self) -> bool:
        """Whether as much is put around every input."""
        return self.padding == "same" and tuple(self.strides) == (1, 1)

    def _product(self, x: Tensor) -> Tensor:
        if self._last:
            x = x.permute(0, 3, 1, 2)
        if self.padding == "same" and not self._same_everywhere:
            around: list[int] = []
            for n, k, s, d in zip(
                x.shape[2:], self.kernel_size, self.strides, self.dilation_rate, strict=True
            ):
                more = max((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, 0)
                around = [more // 2, more - more // 2, *around]
            x = functional.pad(x, around)
        y = self.sparse(x)
        return y.permute(0, 2, 3, 1) if self._last else y

    def to_dense(self) -> Tensor:
        """The kernel as `Conv2D` has it, [height, width, channels / groups, filters]."""
        return self.sparse.to_dense().permute(2, 3, 1, 0)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        like = self._like(
            self.kernel_size, self.strides, self.padding, self.data_format, self.dilation_rate
        )
        return tuple(like.compute_output_shape(input_shape))

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


def _two(name: str, value: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(value, (list, tuple)) and len(value) == 2:
        return tuple(check_integer(name, n, 1) for n in value)
    return (check_integer(f"{name}, or each of its two,", value, 1),) * 2
