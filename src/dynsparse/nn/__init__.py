"""Sparse layers, and models made of them."""

from dynsparse.nn import attention_patterns
from dynsparse.nn.attention import Dropout, SparseMultiheadAttention, SparseTransformerLayer
from dynsparse.nn.conv import SparseConv1d, SparseConv2d, fuse_conv_bn_eval
from dynsparse.nn.convert import densify, sparsify
from dynsparse.nn.cross_entropy import linear_cross_entropy
from dynsparse.nn.embedding import SparseEmbedding, TiedEmbedding, TiedHead
from dynsparse.nn.experts import merge_experts, split_experts
from dynsparse.nn.inference import freeze
from dynsparse.nn.linear import SparseLinear
from dynsparse.nn.models import describe, follow_patterns, param_groups
from dynsparse.nn.quantized import QuantizedSparseLinear, quantize
from dynsparse.nn.weights_file import load_pretrained, load_safetensors, save_safetensors

__all__ = [
    "Dropout",
    "QuantizedSparseLinear",
    "SparseConv1d",
    "SparseConv2d",
    "SparseEmbedding",
    "SparseLinear",
    "SparseMultiheadAttention",
    "SparseTransformerLayer",
    "TiedEmbedding",
    "TiedHead",
    "attention_patterns",
    "densify",
    "describe",
    "follow_patterns",
    "freeze",
    "fuse_conv_bn_eval",
    "linear_cross_entropy",
    "load_pretrained",
    "load_safetensors",
    "merge_experts",
    "param_groups",
    "quantize",
    "save_safetensors",
    "sparsify",
    "split_experts",
]
