"""Triplets, and the sparse layer of Graphcore's application, under their original names.

They ease porting: each is a call or two of a `SparsePattern` or an `nn.SparseLinear`, which new
programs should use directly. As in the application, a weight is [in, out]: rows are inputs, columns
are outputs, and indices count blocks, not elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynsparse._core.checks import (
    check_choice,
    check_integer,
    check_kind,
    check_sizes,
    check_types,
    check_within,
    shorten,
)
from dynsparse.nn import SparseLinear
from dynsparse.pattern import SparsePattern
from dynsparse.pattern.index_arrays import to_slot_order
from popsparse.formats import to_numpy


class Triplets(NamedTuple):
    """The block positions of a matrix [in, out] and their values, in any order.

    Attributes:
        row_indices, col_indices: block coordinates, integers [n].
        values: [n], or [n, b, b].
    """

    row_indices: np.ndarray
    col_indices: np.ndarray
    values: np.ndarray

    @property
    def block_size(self) -> int:
        return 1 if np.ndim(self.values) == 1 else np.shape(self.values)[1]


def _pattern_of(triplets: Any, shape: Sequence[int]) -> tuple[SparsePattern, Tensor]:
    """The pattern [out, in] of triplets [in, out], and the values in its order."""
    rows, cols, values = Triplets(*triplets)
    values = to_numpy(values)
    if values.ndim not in (1, 3) or (values.ndim == 3 and values.shape[1] != values.shape[2]):
        raise ValueError(f"values must be [n] or [n, b, b], got {list(values.shape)}")
    height, width = check_sizes("shape", shape, ("in", "out"))
    block_size = 1 if values.ndim == 1 else values.shape[1]
    pattern = SparsePattern(cols, rows, shape=(width, height), block_size=block_size)
    if len(values) != pattern.nnz:
        raise ValueError(f"expected a value for each of {pattern.nnz} indices, got {len(values)}")
    order = np.lexsort((to_numpy(rows), to_numpy(cols)))
    ordered = torch.from_numpy(values[order])
    return pattern, ordered if values.ndim == 1 else ordered.mT.contiguous()


def _triplets_of(pattern: SparsePattern, values: Tensor) -> Triplets:
    """Triplets in row-major order, as in the application."""
    rows, cols = pattern.cols.numpy(), pattern.rows.numpy()
    order = np.lexsort((cols, rows))
    blocks = values.detach().cpu()
    blocks = blocks if blocks.ndim == 1 else blocks.mT
    return Triplets(rows[order], cols[order], blocks.numpy()[order])


@check_types
def triplets_from_dense(matrix: Any, block_size: int = 1) -> Triplets:
    """The blocks of a matrix [in, out] that are not all zero, row-major.

    Raises:
        ValueError: not a matrix, or a block size that does not divide it.
    """
    weight = torch.from_numpy(np.ascontiguousarray(to_numpy(matrix, "matrix").T))
    pattern = SparsePattern.from_mask(weight != 0, block_size)
    return _triplets_of(pattern, pattern.values_of(weight))


def dense_from_triplets(
    shape: Sequence[int], row_indices: Any, col_indices: Any, values: Any
) -> np.ndarray:
    """Triplets as a matrix [in, out] of this `shape`.

    Raises:
        ValueError: an index out of range or twice, values of another number or shape.
    """
    pattern, ordered = _pattern_of((row_indices, col_indices, values), shape)
    return pattern.to_dense(ordered).T.numpy()


def mask_from_triplets(
    shape: Sequence[int], row_indices: Any, col_indices: Any, values: Any
) -> np.ndarray:
    """1 where triplets have a value, 0 elsewhere, [in, out]. Errors as above."""
    pattern, ordered = _pattern_of((row_indices, col_indices, values), shape)
    return pattern.to_mask().T.numpy().astype(ordered.numpy().dtype)


class SparseFcLayer(SparseLinear):
    """A sparse fully connected layer [batch, in] to [batch, hidden_size], made from triplets.

    It is an `nn.SparseLinear`, and trainers, optimizers and files treat it as one. It needs no
    build step and no update operation: `update_triplets` takes effect at once. Slot variables are
    the state of a torch optimizer, passed to the functions for slots.
    """

    relu = False

    def forward(self, x: Tensor) -> Tensor:
        """y = x W + b, followed by a ReLU if the layer has one."""
        y = super().forward(x)
        return y.relu() if self.relu else y

    @classmethod
    def from_triplets(
        cls,
        hidden_size: int,
        input_shape: Sequence[int],
        row_indices: Any,
        col_indices: Any,
        values: Any,
        matmul_options: Mapping[str, Any] | None = None,
        *,
        dtype: Any = torch.float32,
        use_bias: bool = False,
        relu: bool = False,
        target: Any = None,
    ) -> SparseFcLayer:
        """Create a layer with these blocks; the bias is 0.

        Args:
            hidden_size: number of outputs.
            input_shape: [batch, in]; inputs may have any other batch size.
            row_indices, col_indices, values: see `Triplets`.
            matmul_options: options of products on the machine, see `Options`; need a `target`.
            dtype: a floating-point type of torch.
            use_bias, relu: whether to add a bias and apply a ReLU.
            target: a `Target` for the products, or None.

        Raises:
            ValueError: an index out of range or repeated, values of a wrong number or shape,
                options without a target.
        """
        inputs = check_sizes("input_shape", input_shape, ("batch", "in"))[1]
        triplets = Triplets(row_indices, col_indices, values)
        pattern, ordered = _pattern_of(triplets, (inputs, hidden_size))
        layer = cls(
            inputs,
            pattern.shape[0],
            bias=use_bias,
            pattern=pattern,
            target=target,
            target_options=matmul_options,
            dtype=dtype,
        )
        with torch.no_grad():
            layer.values.copy_(ordered)
            if layer.bias is not None:
                layer.bias.zero_()
        layer.relu = relu
        return layer

    @classmethod
    def from_random_generator(
        cls,
        hidden_size: int,
        input_shape: Sequence[int],
        density: float | None,
        block_size: int,
        values_initialiser_gen: Callable[..., Any],
        indices_initialiser_gen: np.random.Generator,
        matmul_options: Mapping[str, Any] | None = None,
        *,
        max_non_zeros: int | None = None,
        **more: Any,
    ) -> SparseFcLayer:
        """Create a layer with blocks at random positions.

        Args:
            hidden_size, input_shape, matmul_options: as for `from_triplets`; `more` are its other
                arguments.
            density: present blocks over all blocks, their number rounded up; or None.
            block_size: edge of the blocks.
            values_initialiser_gen: called with `size`, the number of values.
            indices_initialiser_gen: chooses the blocks.
            max_non_zeros: the number of blocks, in place of `density`.

        Raises:
            ValueError: neither or both of density and max_non_zeros; a density outside [0, 1];
                more blocks than there are; sizes that blocks do not divide.
        """
        inputs = check_sizes("input_shape", input_shape, ("batch", "in"))[1]
        total = SparsePattern([], [], shape=(hidden_size, inputs), block_size=block_size).total
        if (density is None) == (max_non_zeros is None):
            raise ValueError("expected density or max_non_zeros, and None for the other")
        if max_non_zeros is None:
            count = math.ceil(check_within("density", density, "[0, 1]") * total)
        else:
            count = check_integer("max_non_zeros", max_non_zeros, 0)
        if count > total:
            raise ValueError(f"max_non_zeros must be at most {total}, got {count}")
        if not callable(values_initialiser_gen):
            shown = shorten(values_initialiser_gen)
            raise TypeError(f"values_initialiser_gen must be callable, got {shown}")
        check_kind(
            "indices_initialiser_gen", indices_initialiser_gen, np.random.Generator, "NumPy's"
        )
        flat = np.sort(indices_initialiser_gen.choice(total, count, replace=False))
        rows, cols = np.divmod(flat, hidden_size // block_size)
        values = np.asarray(values_initialiser_gen(size=count * block_size**2))
        if block_size > 1:
            values = values.reshape(count, block_size, block_size)
        return cls.from_triplets(
            hidden_size, input_shape, rows, cols, values, matmul_options, **more
        )

    def get_triplets(self) -> Triplets:
        """The layer's current blocks, row-major."""
        return _triplets_of(self.pattern, self.values)

    def extract_dense(self) -> np.ndarray:
        """The dense weight [in, out]."""
        return self.to_dense().detach().cpu().numpy().T

    def extract_mask(self) -> np.ndarray:
        """1 where the weight [in, out] has a value, 0 elsewhere."""
        return mask_from_triplets((self.in_features, self.out_features), *self.get_triplets())

    def update_triplets(self, triplets: Triplets) -> None:
        """Replace the blocks by the same number of others. Optimizer slots stay: see below.

        Raises:
            ValueError: a different number or size of blocks; as `from_triplets`.
        """
        pattern, values = _pattern_of(triplets, (self.in_features, self.out_features))
        self.set_pattern(pattern, values)

    def extract_slot_triplets(self, optimizer: torch.optim.Optimizer) -> dict[str, Triplets]:
        """The optimizer's state tensors that are like the layer's values, by their name in it."""
        state = optimizer.state.get(self.values, {})
        return {
            name: _triplets_of(self.pattern, slot)
            for name, slot in state.items()
            if isinstance(slot, Tensor) and slot.shape == self.values.shape
        }

    @torch.no_grad()
    def update_slots_from_triplets(
        self, optimizer: torch.optim.Optimizer, slots: Mapping[str, Triplets]
    ) -> None:
        """Set the optimizer's state; after `update_triplets`, with the same indices.

        Raises:
            ValueError: a name that the state does not have, or other indices than the layer's.
        """
        ready = []
        for name, triplets in slots.items():
            check_choice("slot", name, [*self.extract_slot_triplets(optimizer)])
            pattern, values = _pattern_of(triplets, (self.in_features, self.out_features))
            if pattern != self.pattern:
                raise ValueError(f"slot {name}: its indices are not those of the layer")
            ready.append((optimizer.state[self.values][name], values))
        for slot, values in ready:
            slot.copy_(to_slot_order(values, self.pattern.slots))
