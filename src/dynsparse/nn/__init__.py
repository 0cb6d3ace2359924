"""Sparse layers."""

from dynsparse.nn.linear import SparseLinear

__all__ = ["SparseLinear"]
