"""Products of block-sparse matrices, and the softmax of their rows, on the tile machine."""

from popsparse.block_sparse.partition import BlockSparsePlan, MatmulParams, plan
from popsparse.block_sparse.program import create_matmul_lhs, create_matmul_rhs, matmul
from popsparse.block_sparse.rows import softmax, softmax_grad, softmax_in_place
from popsparse.planning.options import Options

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
