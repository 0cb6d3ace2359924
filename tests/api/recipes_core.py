"""Valid calls of patterns, operators and conversions of models."""

from __future__ import annotations

from types import SimpleNamespace

import scipy.sparse
import torch
from recipes import Recipe, call, of
from recipes_parts import X, folder, generator, model, pattern, rewiring, values
from torch import nn

import dynsparse as ds
import popsparse
from dynsparse.allocation import allocate
from dynsparse.ops.embedding import embedding
from dynsparse.ops.grow import random_outside, select, topk_outside
from dynsparse.ops.linear import grad_input, grad_weight, layer_linear, linear
from dynsparse.ops.linear.layer_index import LayerIndex, Read
from dynsparse.pattern import PatternIndex, sample_without_replacement


def dense_model():
    return nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))


def weights_file():
    path = folder() / "model.safetensors"
    ds.save_safetensors(model(), path)
    return path


def use_kernel(kind):
    with ds.ops.use_kernel(kind):
        pass


SHAPE = lambda: (8, 12)  # noqa: E731
PATHS = (OSError,)


class Experts(nn.Module):
    """Stores matrices as the experts of transformers do."""

    is_transposed, has_gate = False, True

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 6, 4))
        self.down_proj = nn.Parameter(torch.randn(2, 4, 3))


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
    "dynsparse.pattern.Rewiring": Recipe(
        lambda **named: ds.pattern.Rewiring(**named).apply(values()),
        lambda: {name: getattr(rewiring(), name) for name in ("before", "after", "source")},
    ),
    "dynsparse.pattern.Rewiring.make": call(
        ds.pattern.Rewiring.make,
        pattern=pattern,
        drop=lambda: torch.tensor([0]),
        grow=lambda: (pattern().to_mask().flatten() == 0).nonzero().flatten()[:1],
    ),
    "dynsparse.pattern.Rewiring.between": call(
        ds.pattern.Rewiring.between, before=pattern, after=pattern
    ),
    "dynsparse.pattern.Rewiring.apply": of(rewiring, "apply", tensor=values, fill=lambda: 1.0),
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
    "dynsparse.nn.split_experts": call(ds.nn.split_experts, model=Experts),
    "dynsparse.nn.merge_experts": call(
        ds.nn.merge_experts, model=lambda: ds.nn.split_experts(Experts())
    ),
    "dynsparse.freeze": call(ds.freeze, model=model),
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
            "per_row": False,
            "target": popsparse.machine.Target.bow(tiles=4),
            "target_options": {"partials_type": "float32"},
        },
    ),
    "dynsparse.quantize": call(
        ds.quantize,
        model=lambda: nn.Sequential(model(), ds.nn.SparseLinear(4, 4)),
        activations=lambda: "int8",
        exclude=lambda: ["1"],
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
    "dynsparse.param_groups": call(ds.param_groups, model=model, weight_decay=lambda: 0.1),
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
            "read": Read(LayerIndex(pattern().index, values()), values(), False),
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
        sort=lambda: True,
    ),
    "dynsparse.ops.grow.GrowCandidates": call(
        ds.ops.grow.GrowCandidates, flat=lambda: torch.tensor([0]), scores=lambda: torch.ones(1)
    ),
}
