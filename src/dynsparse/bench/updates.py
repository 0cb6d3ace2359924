"""What a pattern update costs beside training steps, whole and in pieces."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dynsparse.bench.cells import Cell
from dynsparse.bench.contenders import build_layer
from dynsparse.nn import SparseLinear
from dynsparse.ops.grow import topk_outside
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.training import ConstantSchedule, RigL, SparseTrainer, Static
from dynsparse.training.drop import lowest, magnitude

DROP_FRACTION = 0.3

Work = Callable[[], object]


def update_parts(cell: Cell) -> tuple[SparseLinear, dict[str, Work]]:
    """A step with Adam (the reference), one that ends in an update, and the pieces of the update.

    - drop: ranking the magnitudes; growth: the best positions from x and dY;
    - dense_topk: growth as it is done elsewhere, by the dense gradient and torch.topk;
    - rewiring: the new pattern, with values and both of Adam's states following it;
    - encoding: the index tensors of a pattern that is new.

    The share of training time that updates take follows from `step_with_update` over `step`.
    """
    layer, x, dy = build_layer(cell)
    pairs = [(x.detach(), dy)]
    pattern = layer.pattern
    count = min(int(DROP_FRACTION * pattern.nnz), pattern.total - pattern.nnz)
    mask = pattern.to_mask()
    states = [torch.zeros_like(layer.values.detach()) for _ in range(3)]

    def drop() -> torch.Tensor:
        return lowest(magnitude(layer.values), count)

    def growth() -> torch.Tensor:
        return topk_outside(pairs, pattern, count, sort=False).flat

    def dense_topk() -> object:
        score = (dy.t() @ pairs[0][0]).abs_().masked_fill_(mask, -1.0)
        b = cell.block
        if b > 1:
            score = score.view(pattern.grid[0], b, pattern.grid[1], b).sum((1, 3))
        return score.flatten().topk(count, sorted=False)

    gone, joins = drop(), growth()

    def rewiring() -> object:
        made = Rewiring.make(pattern, gone, joins)
        return [made.apply(state) for state in states]

    flat = pattern.flat

    def encoding() -> object:
        fresh = SparsePattern.from_flat(flat, shape=pattern.shape, block_size=pattern.block_size)
        return fresh.index

    parts: dict[str, Work] = {
        "step": _training_step(cell, updates=False),
        "step_with_update": _training_step(cell, updates=True),
        "drop": drop,
        "growth": growth,
        "dense_topk": dense_topk,
        "rewiring": rewiring,
        "encoding": encoding,
    }
    return layer, parts


def _training_step(cell: Cell, updates: bool) -> Work:
    layer, x, dy = build_layer(cell)
    optimizer = torch.optim.Adam(layer.parameters())
    trainer: SparseTrainer = Static(layer, optimizer)
    if updates:
        every_step = ConstantSchedule(2**62, 1, DROP_FRACTION)
        trainer = RigL(layer, optimizer, schedule=every_step)

    def step() -> None:
        optimizer.zero_grad()
        x.grad = None
        layer(x).backward(dy)
        trainer.step()

    return step
