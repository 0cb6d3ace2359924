"""Block-sparse matrices: products, softmax and attention."""

from dynsparse.ops.block_sparse.attention import scaled_dot_product_attention
from dynsparse.ops.block_sparse.products import (
    dense_sparse_matmul,
    sampled_matmul,
    softmax,
    sparse_dense_matmul,
)

__all__ = [
    "dense_sparse_matmul",
    "sampled_matmul",
    "scaled_dot_product_attention",
    "softmax",
    "sparse_dense_matmul",
]
