"""Valid calls of layers."""

from __future__ import annotations

import torch
from recipes import Recipe, call, of, used
from recipes_parts import X, generator, layer, model, pattern
from torch import nn

import dynsparse as ds
import popsparse
from dynsparse.nn.active_set import ActiveSet
from dynsparse.nn.models import follow_patterns


def conv(kind=ds.nn.SparseConv2d, block=1):
    return kind(4, 8, 3, density=0.25, block_size=block)


def normed():
    return nn.BatchNorm2d(8).eval()


RECIPES = {
    "dynsparse.nn.SparseLinear": Recipe(
        used(ds.nn.SparseLinear, X),
        lambda: {
            "in_features": 12,
            "out_features": 8,
            "density": 0.25,
            "block_size": 4,
            "bias": True,
            "generator": generator(),
            "target": popsparse.machine.Target.bow(tiles=4),
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
        lambda: {
            "num_embeddings": 8,
            "embedding_dim": 12,
            "density": 0.5,
            "block_size": 4,
            "padding_idx": 1,
        },
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
    "dynsparse.nn.TiedHead": Recipe(
        used(ds.nn.TiedHead, X),
        lambda: {"table": ds.nn.SparseEmbedding(8, 12), "bias": nn.Parameter(torch.zeros(8))},
    ),
    "dynsparse.nn.TiedHead.forward": of(
        lambda: ds.nn.TiedHead(ds.nn.SparseEmbedding(8, 12)), "forward", x=lambda: X
    ),
    "dynsparse.nn.linear_cross_entropy": call(
        ds.nn.linear_cross_entropy,
        hidden=lambda: X,
        head=lambda: nn.Linear(12, 8),
        targets=lambda: torch.zeros(len(X), dtype=torch.int64),
        ignore_index=lambda: 3,
        label_smoothing=lambda: 0.1,
        reduction=lambda: "sum",
        chunk_size=lambda: 2,
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
    "dynsparse.nn.QuantizedSparseLinear": Recipe(
        used(ds.nn.QuantizedSparseLinear, X),
        lambda: {
            "pattern": pattern(),
            "values": torch.ones(pattern().values_shape, dtype=torch.int8),
            "scale": torch.ones(8),
            "bias": torch.ones(8),
            "activations": "int8",
        },
    ),
    "dynsparse.nn.QuantizedSparseLinear.from_float": call(
        ds.nn.QuantizedSparseLinear.from_float,
        layer=lambda: ds.nn.SparseLinear(12, 8, pattern=pattern()),
        activations=lambda: "int8",
    ),
    "dynsparse.nn.QuantizedSparseLinear.forward": of(
        lambda: ds.nn.QuantizedSparseLinear.from_float(
            ds.nn.SparseLinear(12, 8, pattern=pattern())
        ),
        "forward",
        x=lambda: X,
    ),
    "dynsparse.nn.Dropout": call(used(ds.nn.Dropout, X), p=lambda: 0.5, inplace=lambda: False),
    "dynsparse.nn.Dropout.forward": of(ds.nn.Dropout, "forward", x=lambda: X),
    "dynsparse.nn.describe": call(ds.nn.describe, model=model, batch=lambda: 8),
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
}
