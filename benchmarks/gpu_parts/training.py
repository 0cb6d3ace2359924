"""Whole trainings: RigL with its updates beside masked and dense layers, as people train."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import dynsparse as ds
from gpu_parts.layers import replaced
from gpu_parts.run import Run

# Steps between updates, and steps timed: two updates.
INTERVAL, STEPS = 100, 200


def _model(run: Run, b: int) -> nn.Module:
    n, _, density = run.sizes
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [ds.nn.SparseLinear(n, n, density, b, device=run.device), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def _step(run: Run, model: nn.Module, x: Tensor, y: Tensor, sparse: bool) -> Callable[[], None]:
    """Forward in bfloat16 by autocast, backward, Adam on float32 weights, and RigL if `sparse`."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=not run.dry)
    trainer = None
    if sparse:
        trainer = ds.RigL(model, optimizer, total_steps=10**6, update_interval=INTERVAL)

    def step() -> None:
        with torch.autocast(run.device.type, torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        loss.backward()
        if trainer is None:
            optimizer.step()
        else:
            trainer.step()
        optimizer.zero_grad()

    return step


def measure(run: Run) -> None:
    n, batch, _ = run.sizes
    x, y = (torch.randn(batch, n, device=run.device) for _ in range(2))
    for b in (64,) if run.dry else (64, 128, 1):
        if run.left() < 60 and not run.dry:
            return
        sparse = _model(run, b)
        found = {}
        twins = {"masked": replaced(sparse, True), "dense": replaced(sparse, False)}
        for name, model in {"sparse": sparse, **twins}.items():
            if not run.tries(f"training {b} {name}"):
                continue
            found[name] = _time(run, _step(run, model, x, y, name == "sparse"))
        _note(run, f"blocks of {b}, eager", found)
    if run.dry or run.left() < 150 or not run.tries("training compiled"):
        return
    found = {}
    sparse = _model(run, 64)
    for name, model in (("sparse", sparse), ("masked", replaced(sparse, True))):
        compiled = torch.compile(model, mode="reduce-overhead")
        found[name] = _time(run, _step(run, compiled, x, y, False))
    _note(run, "blocks of 64, compiled with reduce-overhead, without updates", found)


def _time(run: Run, step: Callable[[], None]) -> float:
    """Microseconds of a step, updates included, after some to warm up."""
    warm, steps = (1, 2) if run.dry else (5, STEPS)
    for _ in range(warm):
        step()
    run.wait()
    run.alive = begin = time.time()
    for _ in range(steps):
        step()
    run.wait()
    return (time.time() - begin) / steps * 1e6


def _note(run: Run, what: str, found: dict[str, float]) -> None:
    if "sparse" in found and "masked" in found:
        against: dict[str, object] = {}
        if "dense" in found:
            against["to_dense"] = round(found["dense"] / found["sparse"], 2)
        run.note("training", f"{what}, against masked", found["sparse"], dense=found["masked"],
                 **against)  # fmt: skip
