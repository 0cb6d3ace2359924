"""What builds the program of a plan: products of buckets, or of dense weights.

Chosen here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from popsparse.encoding.partitioner import Partitioner
from popsparse.machine import Graph, Sequence, Tensor
from popsparse.planning.plan import Plan
from popsparse.programs import dense
from popsparse.programs.grad_weight import add_grad_weight
from popsparse.programs.layout import create_operand
from popsparse.programs.product import add_product
from popsparse.programs.weights import SparseTensor


class Operations(NamedTuple):
    """The parts of a layer's program, all for one kind of weights.

    Attributes:
        partitioner: of a plan: what encodes patterns and values for the weights.
        create_weights: (graph, plan, name).
        create_operand: (graph, plan, dim, name): the input (`dim` "y") or the gradient of the
            output ("x"), [batch, groups * channels], laid out by its use.
        add_product: (graph, weights, operand, program, pass name) to the result
            [batch, groups * channels].
        add_grad_weight: (graph, weights, gradient, input, program) to [values].
    """

    partitioner: Callable[[Plan], Partitioner | dense.DensePartitioner]
    create_weights: Callable[[Graph, Plan, str], SparseTensor]
    create_operand: Callable[[Graph, Plan, str, str], Tensor]
    add_product: Callable[[Graph, SparseTensor, Tensor, Sequence, str], Tensor]
    add_grad_weight: Callable[[Graph, SparseTensor, Tensor, Tensor, Sequence], Tensor]


_BUCKETS = Operations(
    Partitioner, SparseTensor.create, create_operand, add_product, add_grad_weight
)
_DENSE = Operations(
    dense.DensePartitioner,
    dense.create_dense_weights,
    dense.create_dense_operand,
    dense.add_dense_product,
    dense.add_dense_grad_weight,
)


def operations(plan: Plan) -> Operations:
    """Those of the weights that a plan keeps."""
    return _DENSE if plan.use_dense else _BUCKETS
