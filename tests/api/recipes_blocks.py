"""Right calls of what is sparse in blocks: products, softmax, attention and its patterns."""

from __future__ import annotations

import torch
from recipes import Recipe

import dynsparse as ds
from dynsparse.nn import attention_patterns
from dynsparse.ops import block_sparse


def pattern():
    return ds.SparsePattern([0, 1, 2], [1, 0, 2], shape=(12, 12), block_size=4)


def values():
    return torch.ones(2, 3, 4, 4)


def tokens():
    return torch.ones(2, 1, 12, 5)


RECIPES = {
    "dynsparse.ops.block_sparse.sparse_dense_matmul": Recipe(
        block_sparse.sparse_dense_matmul,
        lambda: {"values": values(), "pattern": pattern(), "dense": torch.ones(2, 12, 5)},
    ),
    "dynsparse.ops.block_sparse.dense_sparse_matmul": Recipe(
        block_sparse.dense_sparse_matmul,
        lambda: {"dense": torch.ones(2, 5, 12), "values": values(), "pattern": pattern()},
    ),
    "dynsparse.ops.block_sparse.sampled_matmul": Recipe(
        block_sparse.sampled_matmul,
        lambda: {"a": torch.ones(2, 12, 5), "b": torch.ones(2, 5, 12), "pattern": pattern()},
    ),
    "dynsparse.ops.block_sparse.softmax": Recipe(
        block_sparse.softmax,
        lambda: {
            "values": values(),
            "pattern": pattern(),
            "subblock_mask": "zero_upper_triangle",
        },
    ),
    "dynsparse.ops.block_sparse.scaled_dot_product_attention": Recipe(
        block_sparse.scaled_dot_product_attention,
        lambda: {
            "query": tokens(),
            "key": tokens(),
            "value": tokens(),
            "pattern": pattern(),
            "is_causal": True,
            "key_padding_mask": torch.zeros(2, 12, dtype=torch.bool),
            "dropout_p": 0.1,
            "scale": 0.5,
        },
    ),
    "dynsparse.nn.attention_patterns.sliding_window": Recipe(
        attention_patterns.sliding_window,
        lambda: {"tokens": 32, "window": 3, "block_size": 4, "causal": False},
    ),
    "dynsparse.nn.attention_patterns.longformer": Recipe(
        attention_patterns.longformer,
        lambda: {"tokens": 32, "window": 3, "global_tokens": 1, "block_size": 4, "causal": False},
    ),
    "dynsparse.nn.attention_patterns.strided": Recipe(
        attention_patterns.strided,
        lambda: {"tokens": 32, "stride": 8, "block_size": 4, "causal": True},
    ),
    "dynsparse.nn.attention_patterns.big_bird": Recipe(
        attention_patterns.big_bird,
        lambda: {
            "tokens": 32,
            "block_size": 4,
            "window_blocks": 3,
            "global_blocks": 1,
            "random_blocks": 1,
            "causal": False,
            "generator": torch.Generator().manual_seed(0),
        },
    ),
}
