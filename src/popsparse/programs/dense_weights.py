"""Programs of plans with `use_dense`, and the choice between these and buckets (`operations`).

Each pass is planned separately. The weights have the layout of forward; the other passes copy them,
and their operands, to their own layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from dynsparse._core.checks import check_types
from dynsparse.pattern import SparsePattern
from popsparse.encoding.partitioner import Encoded, EncodedPattern, Partitioner
from popsparse.formats import COOMatrix, SparseMatrix
from popsparse.machine import Graph, Sequence, Tensor
from popsparse.planning.plan import Plan
from popsparse.programs import dense as product
from popsparse.programs.dense import Layout
from popsparse.programs.grad_weight import add_grad_weight
from popsparse.programs.layout import (
    OperandLayout,
    PlannedTensor,
    SparseTensor,
    create_operand,
    keep_layout,
)
from popsparse.programs.product import add_product


def _layout(plan: Plan, name: str) -> Layout:
    """The cut of a pass, each group on its share of the tiles."""
    return Layout(plan.dense[name], plan.sizes.groups)


def create_dense_weights(graph: Graph, plan: Plan, name: str) -> SparseTensor:
    """Create the weights of a plan with `use_dense`, in the layout of forward."""
    layout = _layout(plan, "forward")
    values = product.create_operand(graph, layout, "a", f"{name} values", transposed=True)
    graph.set_initial_value(values.home if isinstance(values, PlannedTensor) else values, 0)
    return SparseTensor.of_dense(graph, plan, values, name)


def create_dense_operand(graph: Graph, plan: Plan, dim: str, name: str) -> Tensor:
    """Create the input (`dim` "y") or the gradient of the output ("x"), [batch, groups * channels],
    in the layout of forward or grad_input."""
    layout = _layout(plan, "forward" if dim == "y" else "grad_input")
    operand = product.create_operand(graph, layout, "b", name, transposed=True)
    return keep_layout(operand, operand.transpose(1, 0, 2).reshape(*OperandLayout(plan, dim).shape))


def _split_groups(plan: Plan, dim: str, tensor: Tensor) -> Tensor:
    """View an operand [batch, groups * channels] as [groups, batch, channels]."""
    layout = OperandLayout(plan, dim)
    layout.check(tensor)
    view = tensor.reshape(plan.sizes.z, plan.sizes.groups, layout.channels).transpose(1, 0, 2)
    return keep_layout(tensor, view)


def add_dense_product(
    graph: Graph, weights: SparseTensor, operand: Tensor, program: Sequence, name: str
) -> Tensor:
    """Add "forward" or "grad_input" of a plan with `use_dense`; returns [batch, groups * channels].

    Raises what the sparse products raise.
    """
    plan = weights.plan
    forward = name == "forward"
    result = product.add_product(
        graph,
        _layout(plan, name),
        weights.values,
        _split_groups(plan, "y" if forward else "x", operand),
        program,
        name,
        transposed=(forward, True),
    )
    shape = OperandLayout(plan, "x" if forward else "y").shape
    return result.transpose(2, 0, 1).reshape(*shape)


def add_dense_grad_weight(
    graph: Graph, weights: SparseTensor, gradient: Tensor, inputs: Tensor, program: Sequence
) -> Tensor:
    """Add grad_weight of a plan with `use_dense`; [groups * in * out], like the weights."""
    plan = weights.plan
    operands = _split_groups(plan, "y", inputs), _split_groups(plan, "x", gradient)
    layout, name = _layout(plan, "grad_weight"), "grad_weight"
    turned = (True, False)
    return product.add_product(graph, layout, *operands, program, name, transposed=turned).flatten()


class DensePartitioner(Partitioner):
    """Encodes patterns and values as dense weights, zeros included, and decodes them.

    There is no meta-info; the weights are [groups * in * out], flattened. Unlike buckets, dense
    weights do not distinguish a stored zero from a missing one: decoding returns the blocks with a
    non-zero value.

    Args:
        plan: a plan with `use_dense`.
    """

    @check_types
    def __init__(self, plan: Plan) -> None:
        if not plan.use_dense:
            raise ValueError("this plan has buckets: use Partitioner")
        self.block = plan.params.sparsity_params.block_dimensions
        if self.block[0] != self.block[1]:
            raise ValueError(f"dense weights are for square blocks, got {self.block}")
        self.groups = plan.partition.groups
        self.shape = (plan.sizes.x, plan.sizes.y)

    @property
    def nz_size(self) -> int:
        """Values of the weights of all groups."""
        return self.groups * self.shape[0] * self.shape[1]

    def encode_pattern(self, pattern: Any) -> NoReturn:
        """Not supported: a pattern alone changes nothing on the machine.

        Raises:
            ValueError: always.
        """
        raise ValueError("dense weights have no pattern of their own: use set_weights")

    def _encode_patterns(self, patterns: list[Any]) -> EncodedPattern:
        (rows, cols), edge = self.shape, self.block[0]
        positions = []
        for group, pattern in enumerate(patterns):
            if isinstance(pattern, SparseMatrix):
                pattern, _ = pattern.to_pattern()
            if (tuple(pattern.shape), pattern.block_size) != (self.shape, edge):
                raise ValueError(
                    f"expected a pattern of the shape {self.shape} with blocks of {edge}, "
                    f"got {pattern}"
                )
            row, col = (
                at.numpy().astype(np.int64)[:, None, None] * edge
                for at in (pattern.rows, pattern.cols)
            )
            row, col = row + np.arange(edge)[:, None], col + np.arange(edge)
            positions.append(((group * cols + col) * rows + row).ravel())
        none, at = np.zeros(0, np.uint16), np.concatenate(positions)
        return EncodedPattern(none, at, self.nz_size, (1, 1), self.block, None)

    def decode(self, meta_info: Any, nz_values: Any = None) -> Any:
        """Decode as `Partitioner.decode`, to the pattern and values of blocks that are not zero."""
        if isinstance(meta_info, Encoded):
            nz_values = meta_info.nz_values
        array = np.ascontiguousarray(self._check_values(nz_values))
        weights = torch.from_numpy(array).reshape(self.groups, *self.shape[::-1]).mT
        patterns = [SparsePattern.from_mask(weight != 0, self.block[0]) for weight in weights]
        pairs = [(p, p.values_of(weight)) for p, weight in zip(patterns, weights, strict=True)]
        return pairs[0] if self.groups == 1 else pairs

    def matrices(self, encoded: EncodedPattern, nz_values: np.ndarray) -> list[COOMatrix]:
        """The blocks of each group at the encoded positions, zeros included."""
        area = self.block[0] * self.block[1]
        group, at = np.divmod(encoded.positions[::area], self.shape[0] * self.shape[1])
        col, row = np.divmod(at, self.shape[0])
        values = nz_values[encoded.positions].reshape(-1, area)
        of_group = (np.flatnonzero(group == number) for number in range(self.groups))
        return [
            COOMatrix(values[own].ravel(), col[own], row[own], self.shape, self.block)
            for own in of_group
        ]


class Operations(NamedTuple):
    """The operations of a layer's program for one kind of weights.

    Attributes:
        partitioner: (plan): encodes patterns and values for the weights.
        create_weights: (graph, plan, name).
        create_operand: (graph, plan, dim, name): the input (`dim` "y") or the gradient of the
            output ("x"), [batch, groups * channels], in the layout the plan needs.
        add_product: (graph, weights, operand, program, pass name) to the result
            [batch, groups * channels].
        add_grad_weight: (graph, weights, gradient, input, program) to [values].
    """

    partitioner: Callable[[Plan], Partitioner]
    create_weights: Callable[[Graph, Plan, str], SparseTensor]
    create_operand: Callable[[Graph, Plan, str, str], Tensor]
    add_product: Callable[[Graph, SparseTensor, Tensor, Sequence, str], Tensor]
    add_grad_weight: Callable[[Graph, SparseTensor, Tensor, Tensor, Sequence], Tensor]


_BUCKETS = Operations(
    Partitioner, SparseTensor.create, create_operand, add_product, add_grad_weight
)
_DENSE = Operations(
    DensePartitioner,
    create_dense_weights,
    create_dense_operand,
    add_dense_product,
    add_dense_grad_weight,
)


def operations(plan: Plan) -> Operations:
    """The operations for the weights of a plan."""
    return _DENSE if plan.use_dense else _BUCKETS
