"""Repair a pruned model block by block: each block learns the outputs of its dense block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynsparse._core.checks import check_integer, check_types, check_within
from dynsparse.nn.calibration import Blocks, drop_padding, evaluation_mode, list_batches
from dynsparse.nn.quantized import refuse_int8
from dynsparse.nn.sparse_module import SparseModule


class RepairedBlock(NamedTuple):
    """A block of a model and how far its outputs are from those of the dense block.

    Attributes:
        name: the name of the block in the model.
        before, after: ||sparse - dense||^2 / ||dense||^2 over all calibration batches, before and
            after the repair of this block; those before it are repaired in both.
    """

    name: str
    before: float
    after: float


@check_types
def repair(
    model: nn.Module,
    dense: nn.Module,
    calibration: Iterable[Any],
    *,
    epochs: int = 10,
    lr: float = 1e-3,
    verbose: bool = True,
) -> list[RepairedBlock]:
    """Train each block of a sparse model to reproduce the outputs of its block of the dense model.

    One block after another: the dense block takes the hidden states of the dense model, the sparse
    block those of the repaired blocks before it, and Adam with a cosine schedule minimises the mean
    squared difference (Guo et al. 2024, "EBFT: Effective and Block-Wise Fine-Tuning for Sparse
    LLMs"). All parameters of the block that require a gradient are trained, in evaluation mode;
    patterns stay. A block that does not improve keeps its parameters. Positions where the
    `attention_mask` [samples, length] of a batch is 0 do not count.

    Memory besides the two models: gradients and Adam's state of one sparse block, the activations
    of one batch, and three hidden states of every batch.

    Args:
        model: the model with sparse layers, changed in place.
        dense: the model before pruning, of the same architecture.
        calibration: batches as in `dynsparse.sparsify`; each is one step of the optimizer.
        epochs: passes over the batches for each block.
        lr: the initial learning rate.
        verbose: whether to print a line for each block.

    Returns:
        The blocks in the order of the model.

    Raises:
        TypeError, ValueError: no batches; a model without sparse layers, whose blocks are not a
            chain, of which no parameter requires a gradient, or that has other blocks than
            `dense`; a `dense` with the patterns of the model. After a later error, completed blocks
            stay repaired and the others are unchanged.
    """
    check_integer("epochs", epochs, 1)
    check_within("lr", lr, "(0, 1]")
    batches = list_batches(calibration)
    sparse = {n: m for n, m in model.named_modules() if isinstance(m, SparseModule)}
    if not sparse:
        refuse_int8(model)
        raise ValueError("the model has no sparse layers: call dynsparse.sparsify first")
    sizes = {name: module.values.numel() for name, module in sparse.items()}
    twins = dict(dense.named_modules())
    if all(getattr(twins.get(n), "pattern", None) == m.pattern for n, m in sparse.items()):
        raise ValueError(
            "dense must be the model before pruning, got one with the same patterns: pass a "
            "copy.deepcopy(model) from before dynsparse.sparsify"
        )
    repaired = []
    with evaluation_mode(model), evaluation_mode(dense):
        with torch.no_grad():
            sparse_blocks, dense_blocks = (Blocks(m, batches, sizes) for m in (model, dense))
        _release_indices(model)
        if not sparse_blocks.names:
            raise ValueError(
                "the blocks of the model are not a chain in which each takes what the one before "
                "returns, so they cannot be repaired one by one: train the whole model"
            )
        if sparse_blocks.names != dense_blocks.names:
            blocks, others = (_describe_blocks(b.names) for b in (sparse_blocks, dense_blocks))
            raise ValueError(
                f"the models must have the same blocks, got {blocks} and, in dense, {others}"
            )
        modules = map(model.get_submodule, sparse_blocks.names)
        if not any(p.requires_grad for module in modules for p in module.parameters()):
            raise ValueError(
                "none of the parameters of the blocks require a gradient, so there is nothing to "
                "train: call model.requires_grad_() first, for example after dynsparse.freeze"
            )
        hidden, dense_hidden = sparse_blocks.inputs, dense_blocks.inputs
        for k, name in enumerate(sparse_blocks.names):
            with torch.no_grad():
                dense_hidden = dense_blocks.run_all(k, dense_hidden)
            before, after = _repair_block(sparse_blocks, k, hidden, dense_hidden, epochs, lr)
            repaired.append(RepairedBlock(name, before, after))
            if verbose:
                print(f"{name}: error {before:.4g} -> {after:.4g}")
            with torch.no_grad():
                hidden = sparse_blocks.run_all(k, hidden)
            _release_indices(model)
    return repaired


def _release_indices(model: nn.Module) -> None:
    """Free the indices of blocks that wait or are complete, which are rebuilt on demand."""
    for module in model.modules():
        if isinstance(module, SparseModule):
            module._release_index()
            module.pattern.forget_index()


def _describe_blocks(names: list[str]) -> str:
    return f"{len(names)} blocks {names[0]!r}, ..." if names else "no chain of blocks"


def _repair_block(
    blocks: Blocks, k: int, hidden: list[Tensor], targets: list[Tensor], epochs: int, lr: float
) -> tuple[float, float]:
    """Train block k, and return its errors before and after."""
    block = blocks.model.get_submodule(blocks.names[k])
    parameters = [p for p in block.parameters() if p.requires_grad]
    before = _relative_error(blocks, k, hidden, targets)
    if not parameters:
        return before, before
    saved = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.Adam(parameters, lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(hidden))
    after = float("nan")
    try:
        for _ in range(epochs):
            for batch, (x, target) in enumerate(zip(hidden, targets, strict=True)):
                optimizer.zero_grad()
                functional.mse_loss(*_compute_pair(blocks, k, batch, x, target)).backward()
                optimizer.step()
                schedule.step()
        after = _relative_error(blocks, k, hidden, targets)
    finally:
        optimizer.zero_grad()
        if not after <= before:  # worse, NaN, or interrupted
            with torch.no_grad():
                for parameter, value in zip(parameters, saved, strict=True):
                    parameter.copy_(value)
    return before, min(before, after)


def _compute_pair(
    blocks: Blocks, k: int, batch: int, x: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output of block k for x, and its target, [positions, features] without padding."""
    mask = blocks.masks[batch]
    return drop_padding(blocks.run(k, batch, x), mask), drop_padding(target, mask)


@torch.no_grad()
def _relative_error(blocks: Blocks, k: int, hidden: list[Tensor], targets: list[Tensor]) -> float:
    difference = norm = 0.0
    for batch, (x, target) in enumerate(zip(hidden, targets, strict=True)):
        output, target = _compute_pair(blocks, k, batch, x, target)
        difference += float((output - target).square().sum(dtype=torch.float64))
        norm += float(target.square().sum(dtype=torch.float64))
    return difference / norm if norm else difference
