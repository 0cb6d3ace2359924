"""Right calls of patterns, layers, operators and what turns models sparse."""

from __future__ import annotations

import tempfile
from pathlib import Path

import scipy.sparse
import torch
from recipes import Recipe
from torch import nn

import dynsparse as ds
from dynsparse.allocation import allocate
from dynsparse.nn.active import ActiveSet
from dynsparse.nn.averaging import follow_patterns
from dynsparse.ops.embedding import embedding
from dynsparse.ops.grow import random_outside, select, topk_outside
from dynsparse.ops.linear import grad_input, grad_weight, layer_linear, linear
from dynsparse.pattern import PatternIndex, sample_without_replacement


def pattern(block=1):
    return ds.SparsePattern.random(
        (8, 12), nnz=6, block_size=block, generator=torch.Generator().manual_seed(0)
    )


def layer(block=1):
    return ds.nn.SparseLinear(12, 8, density=0.25, block_size=block)


def conv(kind=ds.nn.SparseConv2d, block=1):
    return kind(4, 8, 3, density=0.25, block_size=block)


def normed():
    return nn.BatchNorm2d(8).eval()


def model():
    return nn.Sequential(layer(), nn.ReLU(), nn.Linear(8, 4))


def dense_model():
    return nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))


def values():
    return torch.randn(6)


def generator():
    return torch.Generator().manual_seed(0)


def rewiring():
    before = pattern()
    free = (before.to_mask().flatten() == 0).nonzero().flatten()
    return ds.Rewiring.make(before, torch.tensor([1, 3]), free[[0, 5]])


def folder():
    return Path(tempfile.mkdtemp(prefix="dynsparse-api-"))


def weights_file():
    path = folder() / "model.safetensors"
    ds.save_safetensors(model(), path)
    return path


def of(thing, method, **arguments):
    """A recipe of a method: `thing` makes the object, and each argument is made anew."""
    return Recipe(
        lambda **named: getattr(thing(), method)(**named),
        lambda: {name: make() for name, make in arguments.items()},
    )


def call(function, also=(), **arguments):
    return Recipe(function, lambda: {name: make() for name, make in arguments.items()}, tuple(also))


def used(maker, *inputs):
    """`maker`, whose result is then called: what it accepts must also work."""

    def run(**named):
        return maker(**named)(*inputs)

    return run


def use_kernel(kind):
    with ds.ops.use_kernel(kind):
        pass


X = torch.ones(3, 12)
SHAPE = lambda: (8, 12)  # noqa: E731
PATHS = (OSError,)

RECIPES = {
    "dynsparse.SparsePattern": call(
        ds.SparsePattern,
        rows=lambda: [0, 1],
        cols=lambda: [1, 0],
        shape=SHAPE,
        block_size=lambda: 4,
    ),
    "dynsparse.SparsePattern.from_flat": call(
        ds.SparsePattern.from_flat,
        flat=lambda: torch.tensor([0, 3]),
        shape=SHAPE,
        block_size=lambda: 4,
    ),
    "dynsparse.SparsePattern.random": call(
        ds.SparsePattern.random,
        shape=SHAPE,
        density=lambda: 0.5,
        block_size=lambda: 4,
        generator=generator,
    ),
    "dynsparse.SparsePattern.random, nnz": call(
        ds.SparsePattern.random, shape=SHAPE, nnz=lambda: 5
    ),
    "dynsparse.SparsePattern.full": call(ds.SparsePattern.full, shape=SHAPE, block_size=lambda: 4),
    "dynsparse.SparsePattern.from_mask": call(
        ds.SparsePattern.from_mask, mask=lambda: torch.eye(8), block_size=lambda: 2
    ),
    "dynsparse.SparsePattern.from_scipy": call(
        ds.SparsePattern.from_scipy,
        matrix=lambda: scipy.sparse.eye(8, format="csr"),
        block_size=lambda: 2,
    ),
    "dynsparse.SparsePattern.contains": of(pattern, "contains", flat=lambda: torch.tensor([0, 5])),
    "dynsparse.SparsePattern.to_dense": of(pattern, "to_dense", values=values),
    "dynsparse.SparsePattern.values_of": of(pattern, "values_of", matrix=lambda: torch.ones(8, 12)),
    "dynsparse.SparsePattern.to_scipy": of(
        pattern, "to_scipy", values=values, format=lambda: "coo"
    ),
    "dynsparse.Rewiring": Recipe(
        lambda **named: ds.Rewiring(**named).apply_(values()),
        lambda: dict(vars(rewiring())),
    ),
    "dynsparse.Rewiring.make": call(
        ds.Rewiring.make,
        pattern=pattern,
        drop=lambda: torch.tensor([0]),
        grow=lambda: (pattern().to_mask().flatten() == 0).nonzero().flatten()[:1],
    ),
    "dynsparse.Rewiring.between": call(ds.Rewiring.between, before=pattern, after=pattern),
    "dynsparse.Rewiring.apply": of(rewiring, "apply", tensor=values, fill=lambda: 1.0),
    "dynsparse.Rewiring.apply_": Recipe(
        lambda tensor, fill: rewiring().apply_(tensor, fill=fill),
        lambda: {"tensor": values(), "fill": torch.ones(2)},
    ),
    "dynsparse.pattern.PatternIndex": Recipe(
        lambda **named: linear(X, values(), PatternIndex(**named)),
        lambda: pattern().index._asdict(),
    ),
    "dynsparse.pattern.sample_without_replacement": call(
        sample_without_replacement,
        population=lambda: 20,
        count=lambda: 5,
        generator=generator,
    ),
    "dynsparse.allocation.allocate": call(
        allocate,
        shapes=lambda: {"a": (8, 8), "b": (16, 8)},
        density=lambda: 0.2,
        method=lambda: "erk",
        block_size=lambda: {"a": 2, "b": 4},
        densities=lambda: {"a": 0.5},
    ),
    "dynsparse.densify": call(ds.densify, model=model),
    "dynsparse.sparsify": Recipe(
        ds.sparsify,
        lambda: {
            "model": dense_model(),
            "density": 0.3,
            "block_size": 2,
            "allocation": "erk",
            "include": ["*"],
            "exclude": ["2"],
            "densities": {"0": 0.3},
            "block_sizes": {"0": 4},
            "start": "magnitude",
            "target": ds.machine.Target.bow(tiles=4),
            "target_options": {"partials_type": "float32"},
        },
    ),
    "dynsparse.save_safetensors": Recipe(
        ds.save_safetensors,
        lambda: {"model": model(), "path": folder() / "w.safetensors", "metadata": {"a": "b"}},
        PATHS,
    ),
    "dynsparse.load_safetensors": call(ds.load_safetensors, PATHS, model=model, path=weights_file),
    "dynsparse.load_pretrained": call(
        ds.load_pretrained, PATHS, model=dense_model, folder_or_file=weights_file
    ),
    "dynsparse.nn.SparseLinear": Recipe(
        used(ds.nn.SparseLinear, X),
        lambda: {
            "in_features": 12,
            "out_features": 8,
            "density": 0.25,
            "block_size": 4,
            "bias": True,
            "generator": generator(),
            "target": ds.machine.Target.bow(tiles=4),
            "target_options": {"partials_type": "float32"},
            "device": "cpu",
            "dtype": torch.float32,
        },
    ),
    "dynsparse.nn.SparseLinear, pattern": Recipe(
        used(ds.nn.SparseLinear, X),
        lambda: {"in_features": 12, "out_features": 8, "pattern": pattern()},
    ),
    "dynsparse.nn.SparseLinear.forward": of(layer, "forward", x=lambda: X),
    "dynsparse.nn.SparseLinear.kernel": of(
        layer, "kernel", batch=lambda: 4, backward=lambda: True, dtype=lambda: torch.float32
    ),
    "dynsparse.nn.SparseLinear.reset_parameters": of(
        layer, "reset_parameters", generator=generator
    ),
    "dynsparse.nn.SparseLinear.from_dense": call(
        ds.nn.SparseLinear.from_dense,
        linear=lambda: nn.Linear(12, 8),
        density=lambda: 0.5,
        block_size=lambda: 4,
    ),
    "dynsparse.nn.SparseConv2d": Recipe(
        used(ds.nn.SparseConv2d, torch.randn(2, 4, 6, 6)),
        lambda: {
            "in_channels": 4,
            "out_channels": 8,
            "kernel_size": (3, 2),
            "stride": 2,
            "padding": (1, 0),
            "dilation": 1,
            "groups": 2,
            "bias": True,
            "padding_mode": "zeros",
            "density": 0.25,
            "block_size": 2,
            "generator": generator(),
            "device": "cpu",
            "dtype": torch.float32,
        },
    ),
    "dynsparse.nn.SparseConv2d, pattern": Recipe(
        used(ds.nn.SparseConv2d, torch.randn(2, 4, 6, 6)),
        lambda: {"in_channels": 4, "out_channels": 8, "kernel_size": (1, 3), "pattern": pattern()},
    ),
    "dynsparse.nn.SparseConv1d": Recipe(
        used(ds.nn.SparseConv1d, torch.randn(2, 4, 6)),
        lambda: {
            "in_channels": 4,
            "out_channels": 8,
            "kernel_size": 3,
            "padding": "same",
            "density": 0.25,
        },
    ),
    "dynsparse.nn.SparseConv2d.forward": of(conv, "forward", x=lambda: torch.randn(2, 4, 6, 6)),
    "dynsparse.nn.SparseConv2d.kernel": of(
        conv,
        "kernel",
        batch=lambda: 4,
        size=lambda: (6, 6),
        backward=lambda: True,
        dtype=lambda: torch.float32,
    ),
    "dynsparse.nn.SparseConv2d.from_dense": call(
        ds.nn.SparseConv2d.from_dense,
        conv=lambda: nn.Conv2d(4, 8, 3),
        density=lambda: 0.5,
        block_size=lambda: 4,
    ),
    "dynsparse.nn.fuse_conv_bn_eval": call(
        ds.nn.fuse_conv_bn_eval,
        conv=lambda: conv().eval(),
        bn=normed,
    ),
    "dynsparse.nn.SparseEmbedding": Recipe(
        used(ds.nn.SparseEmbedding, torch.tensor([0, 3])),
        lambda: {"num_embeddings": 8, "embedding_dim": 12, "density": 0.5, "block_size": 4},
    ),
    "dynsparse.nn.SparseEmbedding.from_dense": call(
        ds.nn.SparseEmbedding.from_dense,
        table=lambda: nn.Embedding(8, 12),
        density=lambda: 0.5,
        block_size=lambda: 4,
    ),
    "dynsparse.nn.SparseEmbedding.forward": Recipe(
        lambda ids: ds.nn.SparseEmbedding(8, 12).forward(ids),
        lambda: {"ids": torch.tensor([0, 7])},
        (IndexError,),
    ),
    "dynsparse.nn.SparseEmbedding.logits": of(
        lambda: ds.nn.SparseEmbedding(8, 12), "logits", x=lambda: X
    ),
    "dynsparse.nn.TiedEmbedding": Recipe(
        used(ds.nn.TiedEmbedding, torch.tensor([0, 3])),
        lambda: {
            "num_embeddings": 8,
            "embedding_dim": 12,
            "features": 16,
            "table_density": 0.5,
            "density": 0.5,
            "block_size": 4,
            "generator": generator(),
            "device": "cpu",
            "dtype": torch.float32,
        },
    ),
    "dynsparse.nn.SparseMultiheadAttention": Recipe(
        lambda **named: ds.nn.SparseMultiheadAttention(**named)(*[torch.ones(2, 3, 12)] * 3),
        lambda: {
            "embed_dim": 12,
            "num_heads": 2,
            "dropout": 0.1,
            "bias": True,
            "kdim": 12,
            "vdim": 12,
            "batch_first": True,
            "head_dim": 4,
            "attention_pattern": ds.SparsePattern([0, 2], [1, 0], shape=(3, 3)),
            "density": 0.5,
            "block_size": 4,
            "generator": generator(),
            "device": "cpu",
            "dtype": torch.float32,
        },
    ),
    "dynsparse.nn.SparseMultiheadAttention.forward": Recipe(
        lambda **named: ds.nn.SparseMultiheadAttention(12, 2, batch_first=True)(**named),
        lambda: {
            "query": torch.ones(2, 3, 12),
            "key": torch.ones(2, 3, 12),
            "value": torch.ones(2, 3, 12),
            "key_padding_mask": torch.zeros(2, 3, dtype=torch.bool),
            "need_weights": True,
            "attn_mask": torch.zeros(3, 3),
            "average_attn_weights": True,
            "is_causal": False,
        },
    ),
    "dynsparse.nn.SparseMultiheadAttention.from_projections": call(
        ds.nn.SparseMultiheadAttention.from_projections,
        attention=lambda: nn.MultiheadAttention(12, 2),
        projections=lambda: {
            name: ds.nn.SparseLinear(12, 12, density=0.5)
            for name in ("q_proj", "k_proj", "v_proj", "out_proj")
        },
    ),
    "dynsparse.nn.SparseTransformerLayer": Recipe(
        used(ds.nn.SparseTransformerLayer, torch.ones(2, 3, 12)),
        lambda: {
            "features": 12,
            "num_heads": 2,
            "hidden_features": 16,
            "head_dim": 4,
            "dropout": 0.1,
            "attention_bias": True,
            "attention_pattern": ds.SparsePattern([0, 2], [1, 0], shape=(3, 3)),
            "density": 0.5,
            "block_size": 4,
            "generator": generator(),
            "device": "cpu",
            "dtype": torch.float32,
        },
    ),
    "dynsparse.nn.SparseTransformerLayer.forward": Recipe(
        lambda **named: ds.nn.SparseTransformerLayer(12, 2, 16)(**named),
        lambda: {
            "x": torch.ones(2, 3, 12),
            "attn_mask": torch.zeros(3, 3),
            "key_padding_mask": torch.zeros(2, 3, dtype=torch.bool),
            "is_causal": False,
        },
    ),
    "dynsparse.nn.Dropout": call(used(ds.nn.Dropout, X), p=lambda: 0.5, inplace=lambda: False),
    "dynsparse.nn.Dropout.forward": of(ds.nn.Dropout, "forward", x=lambda: X),
    "dynsparse.plot": call(ds.plot, source=model, what=lambda: "connectivity", layer=lambda: "0"),
    "dynsparse.param_groups": call(ds.param_groups, model=model, weight_decay=lambda: 0.1),
    "dynsparse.nn.describe": call(ds.nn.describe, model=model),
    "dynsparse.nn.follow_patterns": Recipe(
        follow_patterns, lambda: {"copy": (made := model()), "model": made}
    ),
    "dynsparse.nn.ActiveSet": Recipe(
        lambda **named: ActiveSet(**named)(ds.nn.SparseLinear(12, 8, pattern=pattern()), X),
        lambda: {
            "pattern": pattern(),
            "slots": torch.tensor([0, 2]),
            "device": torch.device("cpu"),
        },
    ),
    "dynsparse.ops.grad_input": call(
        grad_input, dy=lambda: torch.ones(3, 8), values=values, pattern=pattern
    ),
    "dynsparse.ops.grad_weight": call(
        grad_weight, dy=lambda: torch.ones(3, 8), x=lambda: X, values=values, pattern=pattern
    ),
    "dynsparse.ops.use_kernel": Recipe(use_kernel, lambda: {"kind": "small"}),
    "dynsparse.ops.linear.LayerIndex": Recipe(
        lambda **named: linear(X, values(), ds.ops.linear.LayerIndex(**named)),
        lambda: {"index": pattern().index, "values": values()},
    ),
    "dynsparse.ops.linear.linear": call(
        linear, x=lambda: X, values=values, pattern=pattern, bias=lambda: torch.ones(8)
    ),
    "dynsparse.ops.linear.layer_linear": Recipe(
        layer_linear,
        lambda: {
            "x": X,
            "values": values(),
            "bias": None,
            "p": ds.ops.linear.LayerIndex(pattern().index, values()),
            "memory": values(),
        },
    ),
    "dynsparse.ops.embedding.embedding": call(
        embedding,
        (IndexError,),
        ids=lambda: torch.tensor([0, 7]),
        values=values,
        pattern=pattern,
        width=lambda: 12,
    ),
    "dynsparse.ops.grow.random_outside": call(
        random_outside,
        pattern=pattern,
        k=lambda: 3,
        exclude=lambda: (pattern().to_mask().flatten() == 0).nonzero().flatten()[:2],
        generator=generator,
    ),
    "dynsparse.ops.grow.best_free": call(
        ds.ops.grow.best_free,
        scores=lambda: torch.rand(tuple(pattern().grid)),
        pattern=pattern,
        k=lambda: 3,
    ),
    "dynsparse.ops.grow.check_pooling": call(ds.ops.grow.check_pooling, pooling=lambda: "AVG"),
    "dynsparse.ops.grow.select": call(
        select, scores=lambda: torch.randn(9), k=lambda: 3, largest=lambda: True
    ),
    "dynsparse.ops.grow.topk_outside": call(
        topk_outside,
        pairs=lambda: [(X, torch.ones(3, 8))],
        pattern=pattern,
        k=lambda: 3,
        pooling=lambda: "sum",
        exclude=lambda: (pattern().to_mask().flatten() == 0).nonzero().flatten()[:2],
        sort=lambda: True,
    ),
    "dynsparse.ops.grow.GrowCandidates": call(
        ds.ops.grow.GrowCandidates, flat=lambda: torch.tensor([0]), scores=lambda: torch.ones(1)
    ),
}
