"""Whether the results are right, before anything is timed: every kernel against float64."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from dynsparse.ops.grow import topk_outside
from dynsparse.ops.linear.cuda import blocks, dense
from dynsparse.ops.linear.cuda.configurations import BLOCKS
from gpu_parts.data import Data, error
from gpu_parts.run import Run

# Of the norm. 16-bit results are rounded once; tf32 operands before.
LIMITS = {
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
}


def cases(run: Run) -> dict[str, tuple[int, torch.dtype, int, bool]]:
    """Name: block size, type, samples, feature-major. Ragged batches, and a single sample."""
    found = {}
    for b in BLOCKS:
        for dtype in LIMITS:
            for batch, feature_major in ((1000, False), (1000, True), (1, False)):
                if run.dry and (batch == 1 or feature_major) and dtype is not torch.bfloat16:
                    continue
                name = f"blocks {b} {str(dtype)[6:]} batch {batch}"
                name += " feature-major" if feature_major else ""
                found[name] = (b, dtype, 70 if run.dry and batch > 1 else batch, feature_major)
    return found


def one(run: Run, b: int, dtype: torch.dtype, batch: int, feature_major: bool) -> list[float]:
    """Errors of forward and both gradients, then of the dense way's; their bits repeat."""
    n = 3 * b if run.dry else 1024
    d = Data(run.device, n, batch, 0.4, b, dtype, feature_major=feature_major, out=n - b)
    weight, x, dy = d.dense(d.values.double()), d.x.double(), d.dy.double()
    wanted = (linear(x, weight, d.bias.double()), dy @ weight, d.collected(dy.t() @ x))
    errors = []
    for kind in (blocks, dense):
        results = [
            (
                kind.forward(d.x, d.values, d.p, d.bias),
                *kind.backward(d.dy, d.x, d.values, d.p, True, True),
            )
            for _ in range(2)
        ]
        for got, again, right in zip(*results, wanted, strict=True):
            errors.append(error(got, right))
            if not torch.equal(got, again):
                raise AssertionError("two runs give different bits")
    return errors


def check(run: Run) -> None:
    wrong = 0
    for name, (b, dtype, batch, feature_major) in cases(run).items():
        if not run.tries(name):
            wrong += 1
            continue
        try:
            errors = one(run, b, dtype, batch, feature_major)
        except Exception as problem:
            wrong += 1
            run.problem(f"correctness of {name}", problem)
            run.wait()  # raises where the device is lost
            continue
        fine = max(errors) < LIMITS[dtype]
        wrong += not fine
        run.note("correctness", name, errors=[float(f"{e:.1e}") for e in errors],
                 right="yes" if fine else "NO")  # fmt: skip
    run.wait()
    wrong += _growth(run)
    run.state["wrong"] = wrong


def _growth(run: Run) -> int:
    """Growth on the device and on the CPU: the same positions in float64, the same scores, but for
    rounding, in the types that the kernels take."""
    wrong = 0
    for b in (1, 16, 32, 64, 128):
        for dtype in (torch.float64, *LIMITS):
            d = Data(torch.device("cpu"), 2 * b if run.dry else 512, 32, 0.2, b, dtype)
            k = max(1, (d.pattern.total - d.pattern.nnz) // 4)
            name = f"growth, blocks of {b}, {str(dtype)[6:]}"
            if not run.tries(name):
                wrong += 1
                continue
            try:
                here = topk_outside([(d.x, d.dy)], d.pattern, k)
                there = topk_outside([(d.x.to(run.device), d.dy.to(run.device))], d.pattern, k)
                if dtype is torch.float64:
                    same = torch.equal(here.flat, there.flat.cpu())
                else:
                    same = error(there.scores.cpu(), here.scores) < LIMITS[dtype]
            except Exception as problem:
                run.problem(name, problem)
                same = False
            wrong += not same
            run.note("correctness", name, right="yes" if same else "NO")
    return wrong
