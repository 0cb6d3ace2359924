"""Peak rates of the chip, and every candidate of the block kernels beside its bound."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from dynsparse.ops.linear.cuda import blocks, dense, launch
from dynsparse.ops.linear.cuda.chip import Numbers, chip_of
from dynsparse.ops.linear.cuda.configurations import Gradient, Rows, table_of
from dynsparse.ops.linear.cuda.costs import (
    PASSES,
    Bounds,
    Pass,
    bounds,
    config_of,
    rates_of,
)
from gpu_parts.candidates import GRADIENT, ROWS, Compiles
from gpu_parts.data import Data, error
from gpu_parts.run import Run, spread

# Relative to the norm of the dense product of the same numbers: beyond it a result is wrong, not
# just rounded differently.
LIMIT = 1e-2


# ---- the chip ----


@triton.jit
def read_kernel(x, out, elements, loops, BLOCK: tl.constexpr):
    """Reads scattered blocks of x repeatedly: from the L2 cache if x fits in it."""
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    place = tl.program_id(0) * BLOCK % elements
    for _ in range(loops):
        place = (place + 997 * BLOCK) % elements
        total += tl.load(x + place + offsets)
    tl.store(out + tl.program_id(0) * BLOCK + offsets, total)


def ceilings(run: Run) -> None:
    """Rates of copies, the L2 cache, cuBLAS and masks, and the host's launch overhead; also notes
    the measured row of `costs.Rates`."""
    n, batch, _ = run.sizes
    row = rates_of(chip_of(run.device))
    big = torch.randn(64 if run.small else 1 << 28, device=run.device)
    other = torch.empty_like(big)
    us = run.times({"copy": lambda: other.copy_(big)})["copy"]
    memory = 2 * big.nbytes / us * 1e6
    run.note("copy, read and written", us=us, TB_s=memory / 1e12)
    cache = row.cache
    if not run.interpreted:  # the kernel would take the interpreter minutes
        for megabytes in (32, 16):
            x = torch.randn((megabytes << 20) // 4, device=run.device)
            programs, loops, block = chip_of(run.device).multiprocessors * 8, 400, 4096
            out = torch.empty(programs * block, device=run.device)
            launcher = read_kernel[(programs,)]

            def read(launcher=launcher, x=x, out=out, loops=loops, block=block) -> None:
                launcher(x, out, len(x), loops, BLOCK=block, num_warps=8)

            us = run.times({"read": read})["read"]
            cache = programs * loops * block * 4 / us * 1e6
            run.note(f"L2 read of {megabytes} MB", us=us, TB_s=cache / 1e12)
    products: dict[Numbers, float] = {}
    for numbers in ROWS:
        with multiplied(numbers):
            d = Data(run.device, n, batch, 1.0, min(n, 128), _dtype(numbers), weight=True)
            for what, times in run.all_times(dense_calls(d), 0.5).items():
                rate = 2 * batch * n * n / statistics.median(times) * 1e6
                products[numbers] = max(rate, products.get(numbers, 0))
                run.note(f"dense {what}, {numbers}", **spread(times), TFLOP_s=rate / 1e12)
    w = torch.randn(n, n, device=run.device).bfloat16()
    run.note("a mask on a weight", us=run.times({"mask": lambda: w * w})["mask"])
    tensor = {
        "16-bit": products["16-bit"],
        "tf32": products["tf32"],
        "tf32x3": products["tf32"] / 3,
    }
    row = row._replace(products=products, tensor=tensor, cache=cache, memory=memory)
    run.note("for costs.py", row=row)
    _launches(run)


def _launches(run: Run) -> None:
    """Host time of a launch, without waiting for the device."""
    small = torch.zeros(64, device=run.device)
    run.note("host: an operator of torch", us=run.host(lambda: small.add_(1)))
    d = Data(run.device, 256, 64, 0.3, 64, weight=True)
    for name, call in {
        "linear": dense_calls(d)["forward"],
        "forward over blocks": lambda: blocks.forward(d.x, d.values, d.p, d.bias),
        "both gradients over blocks": lambda: blocks.backward(
            d.dy, d.x, d.values, d.p, True, True, sums=[]
        ),
        "forward, the dense way": lambda: dense.forward(d.x, d.values, d.p, d.bias),
        "both gradients, the dense way": lambda: dense.backward(
            d.dy, d.x, d.values, d.p, True, True
        ),
    }.items():
        run.note(f"host: {name}", us=run.host(call))


def dense_calls(d: Data) -> dict[str, Callable[[], Tensor]]:
    """The dense product that each pass replaces."""
    weight = d.weight
    assert weight is not None
    return {
        "forward": lambda: linear(d.x, weight, d.bias),
        "grad_input": lambda: d.dy @ weight,
        "grad_weight": lambda: d.dy.t() @ d.x,
    }


def _dtype(numbers: Numbers) -> torch.dtype:
    return torch.bfloat16 if numbers == "16-bit" else torch.float32


@contextmanager
def multiplied(numbers: Numbers) -> Iterator[None]:
    """Set the precision of float32 products within the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if numbers == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# ---- the kernels ----


class Job(NamedTuple):
    """A kernel: its pass, or "with bias" for one that computes the gradients of values and bias."""

    what: str
    b: int
    numbers: Numbers
    config: Rows | Gradient

    def __str__(self) -> str:
        c = self.config
        more = [f"{k}={getattr(c, k)}" for k, v in c._field_defaults.items() if getattr(c, k) != v]
        return f"{type(c).__name__}({', '.join([*map(str, c[:4]), *more])})"

    @property
    def of(self) -> Pass:
        """The pass that it computes."""
        return next((p for p in PASSES if p == self.what), "grad_weight")

    def call(self, d: Data) -> Callable[[], Tensor]:
        """The launch."""
        c = self.config
        if isinstance(c, Gradient):
            sums: list[Tensor] | None = [] if self.what == "with bias" else None
            return lambda: launch.grad_weight(d.dy, d.x, d.p, d.values.dtype, c, sums)
        if self.what == "forward":
            return lambda: launch.forward(d.x, d.values, d.p, d.bias, c)
        return lambda: launch.grad_input(d.dy, d.values, d.p, c)


def jobs_of(run: Run, d: Data, numbers: Numbers) -> list[Job]:
    """The current configurations first, then the candidates; only a few for small sizes."""
    chip, found = chip_of(run.device), []
    for what in PASSES:
        today = config_of(d.layer, d.batch, what, d.x.dtype, chip)
        if isinstance(today, Gradient):
            known = dict.fromkeys([today, *GRADIENT[numbers][d.b]])
            found += [Job(what, d.b, numbers, c) for c in known]
            if numbers == "16-bit":
                found += [Job("with bias", d.b, numbers, c) for c in known]
        else:
            known = dict.fromkeys([today, *ROWS[numbers][d.b]])
            found += [Job(what, d.b, numbers, c) for c in known]
    if run.small:
        found = list({job.what: job for job in found}.values())
    return found


def _compile(jobs: list[Job], until: float) -> list[str]:
    for name, kernel in list(vars(launch).items()):
        if isinstance(kernel, triton.JITFunction) and name.endswith("_kernel"):
            setattr(launch, name, Compiles(kernel, []))
    problems = []
    for job in jobs:
        if time.time() > until:
            break
        d = Data(torch.device("cuda"), 4 * job.b, 512, 0.5, job.b, _dtype(job.numbers))
        try:
            with multiplied(job.numbers):
                job.call(d)()
        except Exception as problem:  # the launch reports it again
            problems.append(f"{job}: {problem}")
    return problems


def compile_all(run: Run, jobs: list[Job]) -> None:
    """Compile in worker processes, into Triton's cache on disk."""
    if run.interpreted:
        return
    begin, workers = time.time(), max(1, min(15, (os.cpu_count() or 2) - 1, len(jobs)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        shares = [jobs[i::workers] for i in range(workers)]
        until = begin + run.left() / 2
        problems = [p for some in pool.map(_compile, shares, [until] * workers) for p in some]
    run.note(f"compiled {len(jobs)} kernels", s=time.time() - begin, failed=problems)


def measure(run: Run, b: int) -> None:
    """Every candidate for blocks of `b`, beside its bound and the dense product."""
    n, batch, density = run.sizes
    layers = {}
    for numbers in ROWS:
        d = Data(run.device, n, batch, density, b, _dtype(numbers), weight=True)
        with multiplied(numbers):
            layers[numbers] = jobs_of(run, d, numbers)
        del d
    compile_all(run, [job for jobs in layers.values() for job in jobs])
    for numbers, jobs in layers.items():
        d = Data(run.device, n, batch, density, b, _dtype(numbers), weight=True)
        with multiplied(numbers):
            best: dict[str, dict[Job, float]] = {}
            for what in dict.fromkeys(job.what for job in jobs):
                best[what] = _times(run, d, [job for job in jobs if job.what == what])
                if what in PASSES[:2]:
                    wide = sorted(best[what], key=best[what].__getitem__)[: 1 if run.small else 2]
                    groups = [
                        job._replace(config=job.config._replace(group=group))  # type: ignore[call-arg]
                        for job in wide
                        for group in ((4,) if run.small else (1, 4, 8))
                    ]
                    best[what] |= _times(run, d, groups)
            _note_best(run, d, numbers, best)
            if numbers == "16-bit":
                us = run.times({"sum": lambda d=d: d.dy.sum(0)})
                run.note(f"{b} the bias alone, by torch", **us)
        del d
    _small_batches(run, b)


def _times(run: Run, d: Data, jobs: list[Job], where: str = "") -> dict[Job, float]:
    """Median times of the correct jobs; `where` is a prefix of the row names."""
    if not jobs:
        return {}
    what, product, chip = jobs[0].what, jobs[0].of, chip_of(run.device)
    today = config_of(d.layer, d.batch, product, d.x.dtype, chip)
    plain = dense_calls(d)[product]
    wanted = d.collected(plain()) if product == "grad_weight" else plain()
    calls: dict[str, Callable[[], object]] = {"dense": plain}
    errors = {}
    for job in jobs:
        name = f"{where}{d.b} {what} {job.numbers} {job}"
        off = run.case(name, lambda job=job: error(job.call(d)(), wanted))
        if off is None:
            continue
        if off < LIMIT:
            errors[str(job)], calls[str(job)] = off, job.call(d)
        else:
            run.wrong(name, AssertionError(f"error {off:.1e}"))
    found = run.all_times(calls, 0.12 * len(calls))
    base = statistics.median(found.pop("dense"))
    by_name = {str(job): job for job in jobs}
    for name in sorted(found, key=lambda name: statistics.median(found[name])):
        job, us = by_name[name], statistics.median(found[name])
        bound = _bound(run, d, job)
        run.note(
            f"{where}{d.b} {what} {job.numbers} {name}", **spread(found[name]), dense=base,
            ratio=base / us, bound=bound.largest * 1e6, by=bound.name,
            share=bound.largest * 1e6 / us, error=errors[name],
            today=job.config == today,
        )  # fmt: skip
    return {by_name[name]: statistics.median(times) for name, times in found.items()}


def _bound(run: Run, d: Data, job: Job) -> Bounds:
    """The bounds of the job's configuration."""
    return bounds(d.layer, d.batch, job.config, job.numbers, rates_of(chip_of(run.device)))


def _note_best(run: Run, d: Data, numbers: Numbers, best: dict[str, dict[Job, float]]) -> None:
    """Note the best rows for the table, with one configuration for forward and grad_input, and the
    share of its bound that the fastest job of each pass reaches."""
    both = {
        job: us + best["grad_input"][other]
        for job, us in best["forward"].items()
        if (other := job._replace(what="grad_input")) in best["grad_input"]
    }
    gradient = best.get("with bias") or best["grad_weight"]
    if both and gradient:
        rows, least = min(both, key=both.__getitem__), min(gradient, key=gradient.__getitem__)
        run.note(f"for the table {numbers}", row=f"{d.b}: {rows}; {d.b}: {least}")
    shares = {
        what: _bound(run, d, job).largest * 1e6 / times[job]
        for what, times in best.items()
        if times and (job := min(times, key=times.__getitem__))
    }
    run.note(f"shares of the bounds, {numbers}", **shares)


def _small_batches(run: Run, b: int) -> None:
    """Compare tile sizes where few samples or features leave multiprocessors idle."""
    for n, batch in ((256, 64),) if run.small else ((4096, 512), (4096, 1024), (1024, 8192)):
        d = Data(run.device, n, batch, 0.3 if run.small else 0.1, b, weight=True)
        chip = chip_of(run.device)
        today = config_of(d.layer, batch, "forward", torch.bfloat16, chip)
        configs = [today, *table_of(torch.bfloat16, chip).rows[b], Rows(64, 64, 4, 3)]
        jobs = [Job("forward", b, "16-bit", c) for c in dict.fromkeys(configs)]
        _times(run, d, jobs, f"{n} features, {batch} samples: ")


SECTIONS: dict[str, Callable[[Run], None]] = {
    "ceilings": ceilings,
    **{f"kernels {b}": lambda run, b=b: measure(run, b) for b in (64, 128, 32, 16)},
}
