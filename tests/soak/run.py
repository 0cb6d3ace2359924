"""Soak test of memory and open files: `python tests/soak/run.py [--steps N] [--updates N]`.

The algorithms run one after the other in one process. Resident memory and open files are sampled
after a warm-up; step and update counts must be exact. A separate part runs backward passes without
any `trainer.step()`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import dynsparse as ds
from dynsparse.allocation import allocate
from dynsparse.training import ConstantSchedule, SparseTrainer

FEATURES, HIDDEN, CLASSES, BATCH = 64, 96, 10, 16
FINAL_DENSITY = 0.05
_SAMPLES = 30
_WARM = 0.2  # the share of the samples that is warm-up


@dataclasses.dataclass(frozen=True)
class Watched:
    """Samples of resident bytes and open files during a part of the run."""

    name: str
    seconds: float
    memory: list[int]
    files: list[int]
    steps: int = 0
    updates: int = 0

    @property
    def growth(self) -> int:
        """Growth of memory in bytes between the first and the last third after the warm-up.

        Compares the minimum of each third, so memory that is freed again does not count.
        """
        warm = self.memory[int(_WARM * len(self.memory)) :]
        third = max(len(warm) // 3, 1)
        return min(warm[-third:]) - min(warm[:third])

    @property
    def more_files(self) -> int:
        """Number of open files above that after the warm-up."""
        warm = self.files[int(_WARM * len(self.files)) :]
        return max(warm) - warm[0]


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        ds.nn.SparseLinear(FEATURES, HIDDEN, density=0.2),
        nn.ReLU(),
        ds.nn.SparseLinear(HIDDEN, HIDDEN, density=0.2, block_size=4),
        nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
    )


def rigl(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, interval: int):
    schedule = ConstantSchedule(steps + 1, interval, 0.3)
    return ds.RigL(model, optimizer, schedule=schedule)


def set_(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, interval: int):
    schedule = ConstantSchedule(steps + 1, interval, 0.3)
    return ds.SET(model, optimizer, schedule=schedule, seed=0)


def gmp(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, interval: int):
    return ds.GMP(
        model,
        optimizer,
        total_steps=steps,
        update_interval=interval,
        end_fraction=1.0,
        final_density=FINAL_DENSITY,
    )


ALGORITHMS = {"rigl": rigl, "set": set_, "gmp": gmp}


def _batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, BATCH, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (32, BATCH), generator=generator)
    while True:
        yield from zip(x, y, strict=True)


def train(name: str, steps: int, updates: int) -> Watched:
    """Train one algorithm for `steps` steps with exactly `updates` updates.

    Raises:
        AssertionError: if a count differs from what the schedule and the densities imply.
    """
    assert steps % updates == 0, "steps must be a multiple of updates"
    interval = steps // updates
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = ALGORITHMS[name](model, optimizer, steps, interval)
    nnz = {n: layer.pattern.nnz for n, layer in trainer.layers.items()}
    seen: list[int] = []
    trainer.on_update.append(lambda step, rewirings: _check_update(name, trainer, nnz, rewirings))
    trainer.on_update.append(lambda step, rewirings: seen.append(step))
    batches = _batches()

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        trainer.step()

    watched = _watch(name, step, steps)
    assert trainer.steps == steps, (name, trainer.steps)
    assert len(seen) == trainer.updates, (name, trainer.updates)
    if name == "gmp":  # the cubic's last updates round to nothing: they are no updates
        assert seen == sorted(set(seen)), name
        assert all(at % interval == 0 for at in seen), name
    else:
        assert seen == list(range(interval, steps + 1, interval)), name
    shapes = {n: layer.pattern.shape for n, layer in trainer.layers.items()}
    blocks = {n: layer.pattern.block_size for n, layer in trainer.layers.items()}
    final = allocate(shapes, FINAL_DENSITY, method="uniform", block_size=blocks)
    for layer_name, layer in trainer.layers.items():
        pattern = layer.pattern
        wanted = nnz[layer_name]
        if name == "gmp":
            wanted = final[layer_name]
        assert pattern.nnz == wanted, (name, layer_name, pattern.nnz, wanted)
        _check_layer(layer, optimizer)
    return dataclasses.replace(watched, steps=trainer.steps, updates=trainer.updates)


def _check_update(name: str, trainer: SparseTrainer, nnz: dict[str, int], rewirings) -> None:
    for layer_name, rewiring in rewirings.items():
        dropped, grown = len(rewiring.dropped), len(rewiring.grown)
        assert rewiring.after.nnz == rewiring.before.nnz - dropped + grown, layer_name
        if name == "gmp":
            assert grown == 0, layer_name
            assert dropped > 0, layer_name
        else:
            share = trainer.schedule.drop_count(trainer.steps, nnz[layer_name])
            assert dropped == grown == share, (layer_name, dropped, grown, share)


def _check_layer(layer, optimizer: torch.optim.Optimizer) -> None:
    pattern = layer.pattern
    assert tuple(layer.values.shape) == pattern.values_shape
    for tensor in optimizer.state[layer.values].values():
        assert tensor.dim() == 0 or tensor.shape == layer.values.shape
    # Made anew from its coordinates: sorted, distinct and inside, or this raises.
    assert pattern == ds.SparsePattern(
        pattern.rows, pattern.cols, shape=pattern.shape, block_size=pattern.block_size
    )
    assert bool(layer.values.isfinite().all())


def backward_only(name: str, passes: int) -> Watched:
    """Run backward passes with a trainer that captures gradients, but never step.

    `name` says what happens to the gradient between passes: "none" and "zero" as by `zero_grad`;
    "asked": `torch.autograd.grad` of the input, as saliency methods do.
    """
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ds.RigL(model, optimizer, schedule=ConstantSchedule(10, 1, 0.3))
    batches = _batches()

    def one() -> None:
        x, y = next(batches)
        if name == "asked":
            x = x.clone().requires_grad_()
            torch.autograd.grad(nn.functional.cross_entropy(model(x), y), x)
            return
        optimizer.zero_grad(set_to_none=name == "none")
        nn.functional.cross_entropy(model(x), y).backward()

    watched = _watch(f"backward, {name}", one, passes)
    assert trainer.steps == trainer.updates == 0
    return watched


BACKWARDS = ("none", "zero", "asked")


def _watch(name: str, one: Callable[[], None], times: int) -> Watched:
    memory, files, start = [], [], time.monotonic()
    every = max(times // _SAMPLES, 1)
    gc.collect()
    gc.freeze()  # the collections below look at new objects only, which takes a tenth of the time
    for count in range(1, times + 1):
        one()
        if count % every == 0:
            gc.collect()
            memory.append(resident())
            files.append(open_files())
    gc.unfreeze()
    return Watched(name, time.monotonic() - start, memory, files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=34_000, help="of each of three algorithms")
    parser.add_argument("--updates", type=int, default=400, help="of each of three algorithms")
    parser.add_argument("--limit", type=int, default=4 << 20, help="bytes that memory may rise")
    options = parser.parse_args()
    if options.updates < 1 or options.steps < 1 or options.steps % options.updates:
        parser.error("expected --steps to be a multiple of --updates, both of at least 1")
    torch.set_num_threads(1)
    parts = [lambda name=name: train(name, options.steps, options.updates) for name in ALGORITHMS]
    parts += [lambda name=name: backward_only(name, options.steps // 2) for name in BACKWARDS]
    failed = steps = updates = 0
    for part in parts:
        watched = part()
        held = watched.growth <= options.limit and watched.more_files == 0
        failed += not held
        steps, updates = steps + watched.steps, updates + watched.updates
        print(
            f"{watched.name}: {watched.steps:,} steps, {watched.updates:,} updates, "
            f"{watched.seconds:.0f} s; memory {watched.memory[-1] / 2**20:.1f} MiB, "
            f"{watched.growth / 2**10:+.0f} KiB after warm-up; files {watched.files[-1]}, "
            f"{watched.more_files:+d}{'' if held else '; NOT FLAT'}",
            flush=True,
        )
    print(
        f"in all {steps:,} steps with {updates:,} updates; {failed or 'no'} part that is not flat"
    )
    return failed


if __name__ == "__main__":
    sys.exit(main())
