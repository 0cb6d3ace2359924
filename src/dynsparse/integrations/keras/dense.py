"""Keras' `Dense`, sparse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dynsparse.checks import check_integer
from dynsparse.integrations.keras.layer import SparseLayer
from dynsparse.integrations.keras.library import keras
from dynsparse.nn import SparseLinear

__all__ = ["SparseDense"]


@keras.saving.register_keras_serializable("dynsparse")
class SparseDense(SparseLayer):
    """`keras.layers.Dense` of which only the present blocks of the kernel are stored.

    Call it as `Dense`, with the density beside. It computes on, and shares its Parameters with, a
    `dynsparse.nn.SparseLinear`, which is its attribute `sparse`; the values start as theirs do.

    Args:
        units: outputs.
        activation: as in `Dense`.
        density: share of the blocks that are present, in (0, 1].
        block_size: edge of the square blocks; must divide inputs and units.
        use_bias, bias_initializer, bias_regularizer, bias_constraint: as in `Dense`.
        kernel_regularizer: L1, L2 or L1L2, over the present weights.
        seed: draws pattern and values; torch's global generator where it is left out.
        named: `name`, `dtype`, `trainable`, `activity_regularizer` and what else layers take.

    Raises:
        TypeError, ValueError: units below 1; when built, a density outside (0, 1], or a block size
            that does not divide the layer.
    """

    def __init__(
        self,
        units: int,
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
            ("units", units),
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
        self.units = units
        self.input_spec = keras.layers.InputSpec(min_ndim=2)
        self.supports_masking = True

    def _channels(self, shape: Sequence[int | None]) -> int:
        inputs = check_integer("the last dimension of the input", shape[-1], 1)
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: inputs})
        return inputs

    def _matrix_shape(self, channels: int) -> tuple[int, int]:
        return self.units, channels

    def _made(self, channels: int, **start: Any) -> SparseLinear:
        return SparseLinear(channels, self.units, **start)

    def to_dense(self) -> Tensor:
        """The kernel as `Dense` has it, [inputs, units]."""
        return self.sparse.to_dense().t()

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        return (*input_shape[:-1], self.units)

    def get_config(self) -> dict[str, Any]:
        return {"units": self.units} | super().get_config()
