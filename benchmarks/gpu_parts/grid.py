"""Other sizes: what is chosen, whether it was the best, and how far from masked dense."""

from __future__ import annotations

import itertools
import random

import torch
from torch.nn.functional import linear

from dynsparse.ops.linear.cuda import blocks, dense
from dynsparse.ops.linear.cuda.chip import chip_of
from dynsparse.ops.linear.cuda.configurations import BLOCKS
from dynsparse.ops.linear.cuda.costs import PASSES, choose, seconds
from dynsparse.ops.linear.cuda.rates import rates_of
from gpu_parts.data import Data, kept_weight
from gpu_parts.predictions import WANTED
from gpu_parts.run import Call, Run

# The sizes of the study first, then the whole grid in random order, of which comes what there is
# time for: whatever that is, it speaks of all sizes.
_FIRST = [
    (4096, 4096, 0.1), (4096, 16384, 0.1), (4096, 8192, 0.05), (4096, 8192, 0.2),
    (2048, 8192, 0.1), (8192, 8192, 0.1), (4096, 512, 0.1),
]  # fmt: skip
_REST = list(
    itertools.product(
        (1024, 2048, 4096, 8192), (8192, 512, 2048, 16384), (0.1, 0.01, 0.02, 0.05, 0.2, 0.5, 1.0)
    )
)


def cells(run: Run) -> list[tuple[int, int, float, int]]:
    if run.dry:
        return [(128, 64, 0.5, 64), (128, 64, 0.5, 1)]
    found = [(*cell, b) for cell in _FIRST for b in (64, 128, 32, 16)]
    found += [(*cell, b) for cell in _REST for b in (64, 32, 128, 16)]
    found += [(*cell, 1) for cell in _REST if cell[0] * cell[2] < 2000]
    known = {(*cell, b) for cell in _FIRST for b in (64, 128, 32, 16)}
    found = list(dict.fromkeys(found))
    rest = [cell for cell in found if cell not in known]
    random.Random(0).shuffle(rest)
    return [cell for cell in found if cell in known] + rest


def measure(run: Run, share: float) -> None:
    """Until `share` of the budget is spent."""
    worst = []
    for n, batch, density, b in cells(run):
        if run.left(share) < 0:
            break
        if not run.tries(f"grid {n} {batch} {density} {b}"):
            continue
        try:
            worst += _cell(run, n, batch, density, b)
        except torch.cuda.OutOfMemoryError as problem:
            run.problem(f"grid {n} {batch} {density} {b}", problem)
            torch.cuda.empty_cache()
        except Exception as problem:
            run.problem(f"grid {n} {batch} {density} {b}", problem)
            run.wait()  # raises where the device is lost
    for row in sorted(worst)[:20]:
        print("slowest against masked dense:", *row)
    run.state["slower than masked by more than 10 %"] = sum(row[0] < 1 / 1.1 for row in worst)
    run.state["cells"] = len(worst)


def _cell(run: Run, n: int, batch: int, density: float, b: int) -> list[tuple[float, str]]:
    d = Data(run.device, n, batch, density, b, weight=True)
    weight, chip = d.weight, chip_of(run.device)
    assert weight is not None
    mask = (weight != 0).to(weight.dtype)
    found = []
    for backward, passes in ((False, PASSES[:1]), (True, PASSES[1:])):
        calls: dict[str, Call] = {}
        if backward:
            kept = kept_weight(d)
            calls["dense"] = lambda k=kept: dense.backward(d.dy, d.x, d.values, d.p, True, True, k)
        else:
            calls["dense"] = lambda: dense.forward(d.x, d.values, d.p, d.bias)
        if b in BLOCKS:
            calls["blocks"] = (
                (lambda: blocks.backward(d.dy, d.x, d.values, d.p, True, True))
                if backward
                else (lambda: blocks.forward(d.x, d.values, d.p, d.bias))
            )
        if backward:
            calls["masked"] = lambda: (d.dy @ weight, (d.dy.t() @ d.x) * mask)
        else:
            calls["masked"] = lambda: linear(d.x, weight * mask, d.bias)
        times = run.times(calls, 0.1)
        kind = choose(d.layer, batch, backward, d.x.dtype, chip)
        if kind not in times or "masked" not in times:
            continue
        what = f"{n} x {n}, {batch} samples, density {density:g}, blocks of {b}, "
        what += "backward" if backward else "forward"
        row = rates_of(chip)
        expected = sum(seconds(kind, d.layer, batch, p, "16-bit", row) for p in passes)
        best = min((t, k) for k, t in times.items() if k != "masked")[1]
        run.note("grid", f"{what}: {kind}", times[kind], dense=times["masked"],
                 expected=round(expected * 1e6), wanted=WANTED["grid"], best=best,
                 **{f"{k}_us": round(t, 1) for k, t in times.items()})  # fmt: skip
        found.append((round(times["masked"] / times[kind], 2), f"{what}: {kind}"))
    return found
