"""Products of matrices sparse in blocks, and the softmax of their rows, on the tile machine."""

from popsparse.block_sparse.params import MatmulParams, Options
from popsparse.block_sparse.partition import BlockSparsePlan, plan
from popsparse.block_sparse.program import create_matmul_lhs, create_matmul_rhs, matmul
from popsparse.block_sparse.rows import softmax, softmax_grad, softmax_in_place

__all__ = [
    "BlockSparsePlan",
    "MatmulParams",
    "Options",
    "create_matmul_lhs",
    "create_matmul_rhs",
    "matmul",
    "plan",
    "softmax",
    "softmax_grad",
    "softmax_in_place",
]
