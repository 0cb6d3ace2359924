"""Valid calls of block-sparse products, softmax, attention and attention patterns."""

from __future__ import annotations

import torch
from recipes import Recipe

import dynsparse as ds
from dynsparse.nn import attention_patterns
from dynsparse.ops import block_sparse
from popsparse import block_sparse as on_tiles
from popsparse.machine import Graph, Sequence, Target


def pattern():
    return ds.SparsePattern([0, 1, 2], [1, 0, 2], shape=(12, 12), block_size=4)


def values():
    return torch.ones(2, 3, 4, 4)


def tokens():
    return torch.ones(2, 1, 12, 5)


def product(kind="dense_sparse"):
    return getattr(on_tiles.MatmulParams, f"create_{kind}")(
        (8, 8, 8), (4, 4, 4), [[1, 0], [1, 1]], dtype="float32"
    )


def sizes(sparsity):
    return {
        "dim": (8, 8, 8),
        "block_size": (4, 4, 4),
        sparsity: [[1, 0], [1, 1]],
        "dtype": "float32",
        "out_dtype": "float16",
        "partials_type": "float32",
        "num_groups": 1,
    }


def on_machine(call, **made):
    """Make a recipe with a graph, a program and tensors, created by functions of the graph."""

    def make():
        graph = Graph(Target.mk2(tiles=4))
        own = {"graph": graph, "program": Sequence()}
        return {name: one(graph) for name, one in made.items()} | own

    return Recipe(call, make)


def tensor(*shape):
    return lambda graph: graph.add_variable("float32", [*shape], "x", tiles=0)


def rows(**more):
    told = {"dim": (8, 8), "block_size": (4, 4), "sparsity": [[1, 0], [1, 1]]} | more
    return {name: lambda graph, one=one: one for name, one in told.items()}


def operand(create):
    def make():
        options = {"partition_method": "block", "memory_cycle_ratio": 0.5}
        graph = Graph(Target.mk2(tiles=4))
        return {"graph": graph, "params": product(), "options": options}

    return Recipe(create, make)


RECIPES = {
    "popsparse.block_sparse.MatmulParams.create_dense_sparse": Recipe(
        on_tiles.MatmulParams.create_dense_sparse,
        lambda: sizes("rhs_sparsity") | {"rhs_need_transpose": True},
    ),
    "popsparse.block_sparse.MatmulParams.create_dense_dense": Recipe(
        on_tiles.MatmulParams.create_dense_dense,
        lambda: sizes("result_sparsity") | {"subblock_mask": "zero_upper_triangle"},
    ),
    "popsparse.block_sparse.Options": Recipe(
        on_tiles.Options,
        lambda: {"partition_method": "strip", "number_of_pass": 2, "memory_cycle_ratio": None},
    ),
    "popsparse.block_sparse.plan": Recipe(
        on_tiles.plan,
        lambda: {
            "params": product(),
            "target": Target.mk2(tiles=4),
            "options": {"partition_method": "strip"},
        },
    ),
    "popsparse.block_sparse.create_matmul_lhs": operand(on_tiles.create_matmul_lhs),
    "popsparse.block_sparse.create_matmul_rhs": operand(on_tiles.create_matmul_rhs),
    "popsparse.block_sparse.matmul": on_machine(
        on_tiles.matmul,
        params=lambda graph: product(),
        lhs=tensor(8, 8),
        rhs=tensor(3, 16),
        options=lambda graph: {"partition_method": "strip"},
    ),
    "popsparse.block_sparse.softmax": on_machine(
        on_tiles.softmax,
        values=tensor(3, 16),
        **rows(subblock_mask="zero_upper_triangle", num_groups=1),
    ),
    "popsparse.block_sparse.softmax_in_place": on_machine(
        on_tiles.softmax_in_place,
        values=tensor(3, 16),
        **rows(subblock_mask="zero_upper_triangle", num_groups=1),
    ),
    "popsparse.block_sparse.softmax_grad": on_machine(
        on_tiles.softmax_grad, out=tensor(3, 16), out_grad=tensor(3, 16), **rows()
    ),
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
