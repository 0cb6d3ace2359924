"""Sparse products on torch tensors, one folder per operation."""

from dynsparse.ops import block_sparse
from dynsparse.ops.linear import grad_input, grad_weight, use_kernel

__all__ = ["block_sparse", "grad_input", "grad_weight", "use_kernel"]
