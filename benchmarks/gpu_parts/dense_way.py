"""The dense way, for single elements and small blocks: about as fast as a dense layer, or not."""

from __future__ import annotations

from torch.nn.functional import linear

from dynsparse.ops.linear.cuda import dense
from dynsparse.ops.linear.cuda.chip import chip_of
from dynsparse.ops.linear.cuda.costs import seconds
from dynsparse.ops.linear.cuda.rates import rates_of
from gpu_parts.data import Data, kept_weight
from gpu_parts.predictions import EXPECTED
from gpu_parts.run import Run


def measure(run: Run) -> None:
    n, batch, density = run.sizes
    row = rates_of(chip_of(run.device))
    for b, some in ((1, density), (4, density), (16, density), (1, density / 10)):
        d = Data(run.device, n, batch, some, b, weight=True)
        weight, kept = d.weight, kept_weight(d)
        ways = {
            "forward": (
                lambda d=d: dense.forward(d.x, d.values, d.p, d.bias),
                lambda d=d, w=weight: linear(d.x, w, d.bias),
            ),
            "grad_input": (
                lambda d=d, k=kept: dense.backward(d.dy, d.x, d.values, d.p, True, False, k)[0],
                lambda d=d, w=weight: d.dy @ w,
            ),
            "grad_weight": (
                lambda d=d: dense.backward(d.dy, d.x, d.values, d.p, False, True)[1],
                lambda d=d: d.dy.t() @ d.x,
            ),
        }
        beside = 0.0
        for what, (ours, theirs) in ways.items():
            times = run.times({"ours": ours, "dense": theirs}, 0.3)
            if len(times) < 2:
                continue
            expected = seconds("dense", d.layer, batch, what, "16-bit", row)
            run.note("dense way", f"blocks of {b}, density {some:g}, {what}", times["ours"],
                     dense=times["dense"], expected=round(expected * 1e6))  # fmt: skip
            if what == "forward":
                beside = times["ours"] - times["dense"]
        run.note("dense way", f"blocks of {b}, density {some:g}, laying the weight out", beside,
                 expected=EXPECTED["lay out"])  # fmt: skip
        del d
