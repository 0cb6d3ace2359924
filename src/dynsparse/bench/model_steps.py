"""A training step of a whole model: sparsified by one line, masked, and dense.

The model has `zoo.DEPTH` of its blocks. Every part of the step is timed, and what is told of the
whole model counts those of the blocks as many times as there are blocks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dynsparse.bench.cells import Cell
from dynsparse.bench.contenders import dense_layer
from dynsparse.bench.masked import MaskedLinear
from dynsparse.bench.parts import BLOCK_PARTS, PARTS, Clock, blocks_of, watch
from dynsparse.bench.timing import Effort, in_rounds, least_disturbed, timing_of
from dynsparse.bench.zoo import DEPTH, MODELS
from dynsparse.nn import SparseLinear, sparsify


def build_model(cell: Cell, who: str, depth: int) -> nn.Module:
    """The cell's model, as "dynsparse", "masked" or "dense"; the same weights and patterns each.

    Sparse is what is in the blocks; densities are shared by ERK.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[cell.model].make(depth)
        blocks, _ = blocks_of(model)
        sparsify(model, cell.density, cell.block, include=[blocks], verbose=False)
    if who != "dynsparse":
        make = MaskedLinear if who == "masked" else dense_layer
        for name, layer in list(model.named_modules()):
            if isinstance(layer, SparseLinear):
                model.set_submodule(name, make(layer))
    return model


def training_step(cell: Cell, model: nn.Module) -> Callable[[], dict[str, float]]:
    """zero_grad, forward, cross entropy, backward, AdamW; gives the seconds of every part.

    The parameters are float32; bfloat16 is autocast's.
    """
    inputs, labels = MODELS[cell.model].batch(cell.batch, torch.Generator().manual_seed(0))
    _, blocks = blocks_of(model)
    inside = {id(p) for p in blocks.parameters()}
    groups = {
        "optimizer of the blocks": list(blocks.parameters()),
        "optimizer of the rest": [p for p in model.parameters() if id(p) not in inside],
    }
    optimizers = {
        part: torch.optim.AdamW(parameters, lr=1e-5, fused=True)
        for part, parameters in groups.items()
    }
    clock = Clock()
    watch(model, clock)
    low = cell.torch_dtype is torch.bfloat16

    def step() -> dict[str, float]:
        clock.start()
        for part, optimizer in optimizers.items():
            with clock.part(part):
                optimizer.zero_grad()
        with torch.autocast("cpu", enabled=low):
            logits = model(**inputs).logits
        clock.enter("loss")
        logits = clock.left_by_gradient("loss", logits)
        F.cross_entropy(logits.float().flatten(0, -2), labels.flatten()).backward()
        clock.enter("other")
        for part, optimizer in optimizers.items():
            with clock.part(part):
                optimizer.step()
        return clock.stop()

    return step


def measure_model(cell: Cell, names: Iterable[str], effort: Effort) -> dict[str, Any]:
    """Plain types, as `results` describes them."""
    contenders = ["dynsparse", *names]
    models = {who: build_model(cell, who, DEPTH) for who in contenders}
    steps = {who: training_step(cell, model) for who, model in models.items()}
    for step in steps.values():
        step()  # allocations, kernels chosen at the first call, threads

    def attempt() -> dict[str, list[dict[str, float]]]:
        found: dict[str, list[dict[str, float]]] = {who: [] for who in contenders}
        in_rounds(contenders, lambda who: found[who].append(steps[who]()), effort)
        return found

    rounds, foreign = least_disturbed(attempt, effort)
    count = MODELS[cell.model].blocks
    for samples in rounds.values():
        for sample in samples:
            for part in BLOCK_PARTS:
                sample[part] *= count / DEPTH
    of_blocks, whole = (
        timing_of(
            {who: [sum(s[p] for p in parts) for s in found] for who, found in rounds.items()},
            "dynsparse",
            foreign,
            effort,
        )
        for parts in (BLOCK_PARTS, PARTS)
    )
    return {
        **asdict(of_blocks),
        "whole": {"times": asdict(whole)["times"], "ratios": asdict(whole)["ratios"]},
        "parts": {
            who: {part: statistics.median(sample[part] for sample in found) for part in PARTS}
            for who, found in rounds.items()
        },
        "depth": DEPTH,
        "blocks": count,
        "kernel": _kernels(models["dynsparse"], cell),
    }


def _kernels(model: nn.Module, cell: Cell) -> str:
    """What computed the sparse layers' passes."""
    batch = cell.batch * MODELS[cell.model].tokens
    layers = [m for m in model.modules() if isinstance(m, SparseLinear)]
    found = [
        layer.kernel(batch, backward=backward, dtype=cell.torch_dtype)
        for layer in layers
        for backward in (False, True)
    ]
    return ", ".join(dict.fromkeys(found))
