"""Whole steps, pattern updates and memory, beside masked and dense layers; and a grid of sizes."""

from __future__ import annotations

import copy
import itertools
import random
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import dynsparse as ds
from dynsparse.bench.contenders import mask_layers
from dynsparse.nn import SparseLinear
from dynsparse.ops.grow import topk_outside
from dynsparse.ops.grow.on_device import block_scores
from dynsparse.ops.linear.cuda import blocks, dense
from dynsparse.ops.linear.cuda.chip import chip_of
from dynsparse.ops.linear.cuda.configurations import BLOCKS
from dynsparse.ops.linear.cuda.costs import choose
from gpu_parts.data import Data, kept_weight
from gpu_parts.graphs import captured
from gpu_parts.run import Call, Run, spread

HALF = torch.bfloat16


def masked(model: nn.Module) -> nn.Module:
    """A copy with every sparse layer replaced by a dense weight times a mask."""
    device = next(model.parameters()).device
    return mask_layers(nn.Sequential(copy.deepcopy(model))).to(device)


def steps(run: Run) -> None:
    """Forward and both gradients of a layer, eager and captured; float32 values under autocast."""
    n, batch, density = run.sizes
    for b, dtype in [
        *((b, HALF) for b in (64, 128, 32, 16, 1, 8, 4)),
        *((b, torch.float32) for b in (64, 128)),
    ]:
        layer = SparseLinear(n, n, density, b, device=run.device, dtype=dtype)
        x = torch.randn(batch, n, device=run.device, dtype=HALF).requires_grad_()
        dy = torch.randn(batch, n, device=run.device, dtype=HALF)
        twin = ds.densify(nn.Sequential(copy.deepcopy(layer)))
        models = {"sparse": layer, "masked": masked(layer), "dense": twin}
        calls = {k: _step(m, x, dy, dtype is torch.float32) for k, m in models.items()}
        kinds = (
            f"{layer.kernel(batch, dtype=HALF)}, {layer.kernel(batch, backward=True, dtype=HALF)}"
        )
        held = {f"{name}_MB": run.peak(call) / 1e6 for name, call in calls.items()}
        what = f"step, blocks of {b}, " + ("bfloat16" if dtype is HALF else "autocast")
        _beside(run, f"{what}, eager: {kinds}", calls, 1.0, **held)
        ready: dict[str, Call] = {}
        for name, call in calls.items():
            try:
                ready[name] = captured(run, call)
            except Exception as problem:
                run.wrong(f"{what}, captured, {name}", problem)
        _beside(run, f"{what}, captured", ready, 1.0)


def _step(model: nn.Module, x: Tensor, dy: Tensor, autocast: bool) -> Call:
    def step() -> None:
        x.grad = None
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast(x.device.type, HALF) if autocast else nullcontext():
            y = model(x)
        y.backward(dy)

    return step


def _beside(run: Run, what: str, calls: dict[str, Call], seconds: float, **more: object) -> None:
    """Note the time of "sparse", and its speed-up over the others."""
    found = run.all_times(calls, seconds)
    if "sparse" in found:
        us = statistics.median(found["sparse"])
        against = {
            f"over_{k}": statistics.median(t) / us for k, t in found.items() if k != "sparse"
        }
        run.note(what, **spread(found["sparse"]), **against, **more)


# ---- the dense way ----


def dense_way(run: Run) -> None:
    """Products with the values as a dense weight, beside a dense layer."""
    n, batch, density = run.sizes
    for b, some in ((1, density), (4, density), (16, density), (1, density / 10)):
        d = Data(run.device, n, batch, some, b, weight=True)
        weight, kept = d.weight, kept_weight(d)
        for what, ours, theirs in (
            ("forward", _forward(d), lambda d=d, w=weight: linear(d.x, w, d.bias)),
            ("backward", _backward(d, kept), lambda d=d, w=weight: (d.dy @ w, d.dy.t() @ d.x)),
        ):
            name = f"the dense way, blocks of {b}, density {some:g}, {what}"
            _beside(run, name, {"sparse": ours, "dense": theirs}, 0.3)


def _forward(d: Data) -> Call:
    return lambda: dense.forward(d.x, d.values, d.p, d.bias)


def _backward(d: Data, kept: Tensor | None = None) -> Call:
    return lambda: dense.backward(d.dy, d.x, d.values, d.p, True, True, kept)


# ---- growth, updates, memory ----


def growth(run: Run) -> None:
    """Scores alone beside the dense product; selection of the best free positions, with memory."""
    n, batch, density = run.sizes
    for b in (64, 32, 16, 1):
        d = Data(run.device, n, batch, density, b)
        k = max(1, d.pattern.nnz // 10)

        def best(d: Data = d, k: int = k) -> object:
            return topk_outside([(d.x, d.dy)], d.pattern, k, sort=False)

        product = {"dense": lambda d=d: d.dy.t() @ d.x}
        if b > 1:
            scores = {"sparse": lambda d=d, b=b: block_scores([(d.x, d.dy)], b)}
            _beside(run, f"scores of blocks of {b}", {**scores, **product}, 0.3)
        best()
        run.note(f"the best free blocks of {b}", us=run.wall(best),
                 extra_MB=run.peak(best) / 1e6, dense_gradient_MB=4 * n * n / 1e6)  # fmt: skip


def updates(run: Run) -> None:
    """RigL steps with and without an update, and where the host waits: of one layer, and of layers
    of equal sizes, which are updated together."""
    n, batch, density = run.sizes
    for b, width, layers in ((64, n, 1), (32, n, 1), (16, n, 1), (1, n, 1), (64, n // 4, 24)):
        x, dy = (torch.randn(batch, width, device=run.device, dtype=HALF) for _ in range(2))
        times = []
        for interval in (10**6, 1):
            net = nn.Sequential(
                *(SparseLinear(width, width, density, b, device=run.device) for _ in range(layers))
            )
            optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
            trainer = ds.RigL(net, optimizer, total_steps=10**7, update_interval=interval)

            def step(net=net, trainer=trainer, optimizer=optimizer, x=x, dy=dy) -> None:
                net(x).backward(dy)
                trainer.step()
                optimizer.zero_grad()

            times.append(run.wall(step, 10))
            waits = _waits(run, step)
        without, due = times
        what = f"blocks of {b}" if layers == 1 else f"each of {layers} layers, blocks of {b}"
        run.note(f"an update of RigL, {what}", us=(due - without) / layers, step=without / layers,
                 percent_every_100=(due - without) / without, waits=waits)  # fmt: skip


def _waits(run: Run, call: Call) -> list[str]:
    """Source lines where a call makes the host wait for the device."""
    if run.interpreted:
        return []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in caught if "synchroniz" in str(w.message)]
    return [f"{Path(w.filename).name}:{w.lineno}" for w in waits]


def memory(run: Run) -> None:
    """Memory of a layer with Adam, including gradients and index, beside a dense one."""
    n, batch, density = run.sizes
    x = torch.randn(batch, n, device=run.device, dtype=HALF)
    held = {}
    for b in (None, 1, 8, 64):
        before = 0 if run.interpreted else torch.cuda.memory_allocated()
        layer: nn.Module = (
            nn.Linear(n, n, bias=False, device=run.device)
            if b is None
            else SparseLinear(n, n, density, b, bias=False, device=run.device)
        )
        optimizer = torch.optim.Adam(layer.parameters())
        with torch.autocast(run.device.type, HALF):
            loss = layer(x).float().square().mean()
        loss.backward()
        optimizer.step()
        del loss
        run.wait()
        held[b] = 1 if run.interpreted else torch.cuda.memory_allocated() - before
        run.note(f"held with Adam, {'dense' if b is None else f'blocks of {b}'}",
                 MB=held[b] / 1e6, of_dense=held[b] / held[None])  # fmt: skip
        del layer, optimizer


# ---- other sizes ----

# The most important sizes first, then the others in random order until time is up, so that those
# measured represent all sizes.
_FIRST = [
    (4096, 4096, 0.1), (4096, 16384, 0.1), (4096, 8192, 0.05), (4096, 8192, 0.2),
    (2048, 8192, 0.1), (8192, 8192, 0.1), (4096, 512, 0.1),
]  # fmt: skip
_REST = itertools.product(
    (1024, 2048, 4096, 8192), (512, 2048, 8192, 16384), (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
)


def cells(run: Run) -> Iterator[tuple[int, int, float, int]]:
    if run.small:
        yield from ((128, 64, 0.5, 64), (128, 64, 0.5, 1))
        return
    known = [(*cell, b) for cell in _FIRST for b in (64, 128, 32, 16)]
    rest = [(*cell, b) for cell in _REST for b in (64, 128, 32, 16, 1) if b > 1 or cell[0] <= 4096]
    rest = [cell for cell in rest if cell not in known]
    random.Random(0).shuffle(rest)
    yield from known + rest


def grid(run: Run) -> None:
    """The chosen kind, whether it was the best, and its speed-up over masked and plain dense: as
    CUDA graphs, since the host launches small layers more slowly than the device computes them."""
    count, slower, missed = 0, 0, 0
    for n, batch, density, b in cells(run):
        if run.left() < 10:
            break
        try:
            d = Data(run.device, n, batch, density, b, weight=True)
            for backward in (False, True):
                calls = {k: captured(run, call) for k, call in _kinds(d, backward).items()}
                kind = choose(d.layer, batch, backward, HALF, chip_of(run.device))
                times = run.times(calls, 0.1)
                if kind not in times or "plain" not in times:
                    continue
                best = min(set(times) - {"masked", "plain"}, key=times.__getitem__)
                what = f"{n} features, {batch} samples, density {density:g}, blocks of {b}, "
                what += "backward" if backward else "forward"
                run.note(what, us=times[kind], chosen=kind, best=best,
                         over_masked=times["masked"] / times[kind],
                         over_dense=times["plain"] / times[kind], all=times)  # fmt: skip
                count += 1
                slower += times["masked"] < 0.98 * times[kind]
                missed += times[best] < 0.9 * times[kind]
        except torch.cuda.OutOfMemoryError as problem:
            run.wrong(f"grid {n} {batch} {density} {b}", problem)
            torch.cuda.empty_cache()
    run.note("the grid", cells=count, slower_than_masked=slower, chosen_amiss=missed)


def _kinds(d: Data, backward: bool) -> dict[str, Call]:
    weight, kept = d.weight, kept_weight(d)
    assert weight is not None
    mask = (weight != 0).to(weight.dtype)
    if not backward:
        calls: dict[str, Call] = {
            "dense": _forward(d),
            "masked": lambda: linear(d.x, weight * mask, d.bias),
            "plain": lambda: linear(d.x, weight, d.bias),
        }
        if d.b in BLOCKS:
            calls["blocks"] = lambda: blocks.forward(d.x, d.values, d.p, d.bias)
        return calls
    calls = {
        "dense": _backward(d, kept),
        "masked": lambda: (d.dy @ weight, (d.dy.t() @ d.x) * mask),
        "plain": lambda: (d.dy @ weight, d.dy.t() @ d.x),
    }
    if d.b in BLOCKS:
        calls["blocks"] = lambda: blocks.backward(d.dy, d.x, d.values, d.p, True, True)
    return calls


SECTIONS: dict[str, Callable[[Run], None]] = {
    "steps": steps,
    "dense way": dense_way,
    "growth": growth,
    "updates": updates,
    "memory": memory,
    "grid": grid,
}
