"""A layer's pattern as a variable of Keras."""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse.integrations.keras.following import KerasOptimizer
from dynsparse.integrations.keras.library import keras
from dynsparse.nn import SparseLinear
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.training.optimizer_state import prepare_state

__all__ = ["PatternVariable"]


class PatternVariable(keras.Variable):
    """A layer's pattern as a variable [2, blocks], for who takes a model's weights out and puts
    them back: early stopping, `get_weights`, `set_weights`.

    It holds nothing: the layer does. Values stay as they are where a pattern is assigned, slot by
    slot, since theirs is assigned, too.
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
        own = self._sparse.pattern
        pattern = SparsePattern._in_order(*value.cpu(), shape=own.shape, block_size=own.block_size)
        self.put(pattern, self._sparse.values.detach().clone())

    def put(self, pattern: SparsePattern, values: Tensor) -> None:
        """Put a pattern with its values in place; an optimizer's state follows, if there is one."""
        rewiring = Rewiring.between(self._sparse.pattern, pattern)
        self._sparse.resizable |= not rewiring.keeps_size
        parameter = self._sparse.values
        follow = (
            prepare_state(self.optimizer, parameter, rewiring)
            if self.optimizer is not None and parameter in self.optimizer.state
            else None
        )
        self._sparse.set_pattern(pattern, values)
        if follow is not None:
            follow()
