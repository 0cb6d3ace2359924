"""Sparse layers, and models made of them."""

from dynsparse.nn.attention import SparseMultiheadAttention
from dynsparse.nn.convert import densify, sparsify
from dynsparse.nn.describe import describe
from dynsparse.nn.linear import SparseLinear

__all__ = ["SparseLinear", "SparseMultiheadAttention", "densify", "describe", "sparsify"]
