"""Growth and pattern updates on the device: time, memory, and how often the host waits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import dynsparse as ds
from dynsparse.ops.grow import topk_outside
from dynsparse.ops.grow.cuda import block_scores
from gpu_parts.data import Data
from gpu_parts.predictions import EXPECTED, WANTED, WANTED_PERCENT
from gpu_parts.run import Run


def peak(run: Run, call: Callable[[], object]) -> int:
    """Bytes that a call takes beyond what was there."""
    if run.dry:
        call()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def waits(run: Run, call: Callable[[], object]) -> list[str]:
    """Where a call makes the host wait for the device, as file:line of each wait."""
    call()
    if run.dry:
        return []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    told = [w for w in caught if "synchroniz" in str(w.message)]
    return [f"{Path(w.filename).name}:{w.lineno}" for w in told]


def scores_of(d: Data) -> object:
    """A tenth of the blocks grown."""
    k = max(1, d.pattern.nnz // 10)
    return topk_outside([(d.x, d.dy)], d.pattern, k, sort=False)


def scores(run: Run) -> None:
    n, batch, density = run.sizes
    for b in (64, 32, 16, 1):
        d = Data(run.device, n, batch, density, b)
        if not run.tries(f"growth {b}"):
            continue
        if b > 1:  # the scores alone, without their ranking
            alone = run.times({
                "scores": lambda d=d, b=b: block_scores.block_scores([(d.x, d.dy)], b),
                "dense": lambda d=d: d.dy.t() @ d.x,
            })  # fmt: skip
            if len(alone) == 2:
                run.note("growth", f"scores of blocks of {b}", alone["scores"],
                         dense=alone["dense"], expected=EXPECTED["scores"],
                         wanted=WANTED["scores"])  # fmt: skip
        us = run.wall(lambda d=d: scores_of(d))
        dense = run.times({"dense": lambda d=d: d.dy.t() @ d.x})["dense"]
        run.note("growth", f"the best free positions, blocks of {b}", us, dense=dense,
                 expected=EXPECTED["scores"] if b > 1 else None,
                 extra_megabytes=round(peak(run, lambda d=d: scores_of(d)) / 1e6, 1),
                 dense_gradient_megabytes=round(4 * n * n / 1e6, 1))  # fmt: skip
        del d


def updates(run: Run) -> None:
    """A whole RigL update, beside the step that it belongs to."""
    n, batch, density = run.sizes
    for b in (64, 32, 16, 1):
        if not run.tries(f"updates {b}"):
            continue
        times: dict[bool, float] = {}
        for due in (False, True):
            layer = ds.nn.SparseLinear(n, n, density, b, device=run.device)
            optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3, momentum=0.9)
            interval = 1 if due else 10**6
            trainer = ds.RigL(layer, optimizer, total_steps=10**7, update_interval=interval)
            x = torch.randn(batch, n, device=run.device).bfloat16()
            dy = torch.randn(batch, n, device=run.device).bfloat16()

            def step(layer=layer, trainer=trainer, optimizer=optimizer, x=x, dy=dy) -> None:
                layer(x).backward(dy)
                trainer.step()
                optimizer.zero_grad()

            times[due] = run.wall(step, 10)
            where = waits(run, step)
            run.note("updates", f"step {'with' if due else 'without'} an update, blocks of {b}",
                     times[due], host_waits=len(where), waits_at=where)  # fmt: skip
        taken = times[True] - times[False]
        run.note("updates", f"a whole update, blocks of {b}", taken,
                 expected=EXPECTED["scores"] + EXPECTED["update"],
                 percent_of_training_every_100=round(taken / times[False], 2),
                 wanted_percent=WANTED_PERCENT.get(b))  # fmt: skip
