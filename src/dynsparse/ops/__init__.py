"""Sparse products on torch tensors, one folder per operation."""

from dynsparse.ops.embedding import embedding
from dynsparse.ops.linear import grad_input, grad_weight, linear, use_kernel

__all__ = ["embedding", "grad_input", "grad_weight", "linear", "use_kernel"]
