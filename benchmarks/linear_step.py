"""One training step of a sparse linear layer against dense and MKL sparse products.

A step is forward, grad_input and grad_weight with natural [batch, features] tensors in and out,
everything included. Beside it run, interleaved in the same process with the same threads:

- masked: F.linear(x, W * M), dy @ (W * M), (dy^T x) * M: what masks over dense matrices cost;
- dense: the same three products without masks;
- mkl (unstructured only): torch's CSR products, with a second CSR of W^T whose values are permuted
  every step, and torch.sparse.sampled_addmm;
- mix: forward followed by relu, over forward and relu timed apart. Near 1 when both run on one
  thread pool, far above it when two pools fight for the cores.

Each figure is the median over rounds of (other time / dynsparse time), with the quartiles.

    python benchmarks/linear_step.py --threads 2 --cells quick --json linear_step.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dynsparse.ops import native
from dynsparse.ops.linear import cpu
from dynsparse.pattern import SparsePattern

Step = Callable[[], object]

# (features, batch, density, block size)
QUICK = [
    (n, batch, density, block)
    for n in (1024, 4096)
    for batch in (128, 512)
    for density, block in ((0.1, 1), (0.05, 1), (0.1, 16))
]
FULL = [
    (n, batch, density, block)
    for n in (512, 1024, 2048, 4096)
    for batch in (32, 128, 512, 2048)
    for density in (0.01, 0.05, 0.1, 0.2, 0.5)
    for block in (1, 4, 8, 16, 32)
    if n * batch <= 4096 * 512
]


def processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def steps(n: int, batch: int, density: float, block: int) -> dict[str, Step]:
    generator = torch.Generator().manual_seed(0)
    pattern = SparsePattern.random((n, n), density, block_size=block, generator=generator)
    index = pattern.index
    values = torch.randn(pattern.values_shape, generator=generator) / (density * n) ** 0.5
    bias = torch.randn(n, generator=generator)
    x = torch.randn(batch, n, generator=generator)
    dy = torch.randn(batch, n, generator=generator)
    mask = pattern.to_mask().float()
    weight = torch.randn(n, n, generator=generator)

    def sparse() -> object:
        y = cpu.forward(x, values, index, bias)
        return y, cpu.backward(dy, x, values, index, True, True)

    def masked() -> object:
        masked_weight = weight * mask
        y = torch.nn.functional.linear(x, masked_weight, bias)
        return y, dy @ masked_weight, (dy.t() @ x) * mask

    def dense() -> object:
        y = torch.nn.functional.linear(x, weight, bias)
        return y, dy @ weight, dy.t() @ x

    contenders: dict[str, Step] = {"dynsparse": sparse, "masked": masked, "dense": dense}
    if block == 1:
        contenders["mkl"] = mkl_step(pattern, values, bias, x, dy)
    contenders["forward"] = lambda: cpu.forward(x, values, index, bias)
    y = torch.randn(batch, n)
    contenders["relu"] = lambda: torch.relu(y)
    contenders["forward+relu"] = lambda: torch.relu(cpu.forward(x, values, index, bias))
    return contenders


def mkl_step(pattern: SparsePattern, values: Tensor, bias: Tensor, x: Tensor, dy: Tensor) -> Step:
    index = pattern.index
    out, in_features = pattern.shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        csr = torch.sparse_csr_tensor(index.row_ptr, index.cols, values, (out, in_features))
        transposed = torch.sparse_csr_tensor(
            index.col_ptr, index.csc_rows, values.clone(), (in_features, out)
        )
    order = index.csc_perm.long()
    transposed_values = transposed.values()

    def step() -> object:
        y = torch.mm(csr, x.t()).t().contiguous().add_(bias)
        torch.index_select(values, 0, order, out=transposed_values)
        dx = torch.mm(transposed, dy.t()).t().contiguous()
        return y, dx, torch.sparse.sampled_addmm(csr, dy.t(), x, beta=0.0)

    return step


def measure(contenders: dict[str, Step], seconds: float) -> dict[str, list[float]]:
    """Times of each contender, one per round; every round runs each of them once."""
    for step in contenders.values():
        step()
        step()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(times["dynsparse"]) < 7:
        for name, step in contenders.items():
            before = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - before)
    return times


def quartiles(ratios: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(ratios, n=4)
    return {"median": round(median, 3), "low": round(low, 3), "high": round(high, 3)}


def ratios_of(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    own = times["dynsparse"]
    result = {
        name: quartiles([t / s for t, s in zip(times[name], own, strict=True)])
        for name in ("masked", "dense", "mkl")
        if name in times
    }
    apart = zip(times["forward+relu"], times["forward"], times["relu"], strict=True)
    result["mix"] = quartiles([both / (one + other) for both, one, other in apart])
    return result


def text(figure: dict[str, float] | None) -> str:
    if figure is None:
        return "-".center(18)
    return f"{figure['median']:6.2f} [{figure['low']:.2f}-{figure['high']:.2f}]".ljust(18)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ratios of one sparse training step to dense.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cells", choices=("quick", "full"), default="quick")
    parser.add_argument("--seconds", type=float, default=1.5, help="time spent on each cell")
    parser.add_argument("--block-size", type=int, nargs="*", help="only these block sizes")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    if native.load() is None:
        parser.error("the compiled kernels are not there: build them, and unset DYNSPARSE_ISA")
    torch.set_num_threads(options.threads)
    # The beta state of torch's CSR tensors is announced once per process.
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support")

    machine = {
        "processor": processor(),
        "isa": native.describe()["isa"],
        "threads": options.threads,
        "torch": torch.__version__,
    }
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print("ratios: other time / dynsparse time, median [quartiles]; mix: near 1 is good")
    header = f"{'n':>5} {'batch':>5} {'density':>7} {'block':>5}"
    print(header + "".join(f"  {name:<18}" for name in ("masked", "dense", "mkl", "mix")))
    cells = []
    for n, batch, density, block in QUICK if options.cells == "quick" else FULL:
        if options.block_size and block not in options.block_size:
            continue
        figures = ratios_of(measure(steps(n, batch, density, block), options.seconds))
        row = "".join("  " + text(figures.get(name)) for name in ("masked", "dense", "mkl", "mix"))
        print(f"{n:>5} {batch:>5} {density:>7} {block:>5}{row}", flush=True)
        cells.append(
            {"n": n, "batch": batch, "density": density, "block_size": block, "ratios": figures}
        )
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
