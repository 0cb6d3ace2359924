"""Sparse products on torch tensors, one folder per operation."""

from dynsparse.ops.linear import grad_input, grad_weight, use_kernel

__all__ = ["grad_input", "grad_weight", "use_kernel"]
