"""Sparse layers, and models made of them."""

from dynsparse.nn import attention_patterns
from dynsparse.nn.attention import Dropout, SparseMultiheadAttention, SparseTransformerLayer
from dynsparse.nn.conv import SparseConv1d, SparseConv2d, fuse_conv_bn_eval
from dynsparse.nn.convert import densify, sparsify
from dynsparse.nn.embedding import SparseEmbedding, TiedEmbedding
from dynsparse.nn.linear import SparseLinear
from dynsparse.nn.models import describe, follow_patterns, param_groups
from dynsparse.nn.weights_file import load_pretrained, load_safetensors, save_safetensors

__all__ = [
    "Dropout",
    "SparseConv1d",
    "SparseConv2d",
    "SparseEmbedding",
    "SparseLinear",
    "SparseMultiheadAttention",
    "SparseTransformerLayer",
    "TiedEmbedding",
    "attention_patterns",
    "densify",
    "describe",
    "follow_patterns",
    "fuse_conv_bn_eval",
    "load_pretrained",
    "load_safetensors",
    "param_groups",
    "save_safetensors",
    "sparsify",
]
