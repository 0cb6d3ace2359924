"""What the chip can do: copies, the L2 cache, cuBLAS, and what launching costs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear

from dynsparse.ops.linear.cuda.chip import chip_of
from dynsparse.ops.linear.cuda.rates import Rates, rates_of
from gpu_parts.predictions import EXPECTED
from gpu_parts.run import Run


@triton.jit
def read_kernel(x, out, elements, loops, BLOCK: tl.constexpr):
    """Reads blocks of x all over, again and again: from the L2 cache if x fits in there."""
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    place = tl.program_id(0) * BLOCK % elements
    for _ in range(loops):
        place = (place + 997 * BLOCK) % elements
        total += tl.load(x + place + offsets)
    tl.store(out + tl.program_id(0) * BLOCK + offsets, total)


def interpret() -> None:
    """Without a GPU."""
    from triton.runtime.interpreter import InterpretedFunction

    globals()["read_kernel"] = InterpretedFunction(read_kernel.fn)


def reading(run: Run, megabytes: int):
    """A call that reads from so many megabytes, and how many bytes it reads."""
    chip = chip_of(run.device)
    programs, loops, block = (2, 2, 64) if run.dry else (chip.multiprocessors * 8, 400, 4096)
    x = torch.randn((megabytes << 20) // 4 if not run.dry else 1024, device=run.device)
    out = torch.empty(programs * block, device=run.device)

    def call() -> None:
        read_kernel[(programs,)](x, out, len(x), loops, BLOCK=block, num_warps=8)

    return call, programs * loops * block * 4


def measure(run: Run) -> None:
    n, batch, _ = run.sizes
    measured = run.state["measured"]
    _copy(run)
    for megabytes in (16, 32) if not run.dry else (1,):
        call, size = reading(run, megabytes)
        us = run.times({"read": call})["read"]
        measured.setdefault("cache", size / us * 1e6)
        run.note("ceilings", f"L2 read of {megabytes} MB, TB/s", us,
                 expected=EXPECTED["L2 read TB/s"], rate=round(size / us / 1e6, 2))  # fmt: skip
    for some in (batch,) if run.dry else (4096, 8192, 16384):
        _products(run, n, some)
    w = torch.randn(n, n, device=run.device).bfloat16()
    mask = (torch.rand(n, n, device=run.device) < 0.1).bfloat16()
    us = 2 * run.times({"mask": lambda: w * mask})["mask"]
    run.note("ceilings", "masks on a weight and on its gradient", us, expected=EXPECTED["masks"])
    _float32(run, n, batch)
    _launches(run)


def _copy(run: Run) -> None:
    # Sixteen times what the largest L2 caches hold; two of them fit a small GPU.
    big = torch.randn(64 if run.dry else 1 << 28, device=run.device)
    other = torch.empty_like(big)
    us = run.times({"copy": lambda: other.copy_(big)})["copy"]
    rate = run.state["measured"]["memory"] = 2 * big.nbytes / us * 1e6
    run.note("ceilings", "copy, TB/s read and written", us, expected=EXPECTED["copy TB/s"],
             rate=round(rate / 1e12, 2))  # fmt: skip


def _products(run: Run, n: int, batch: int) -> None:
    x, dy = (torch.randn(batch, n, device=run.device).bfloat16() for _ in range(2))
    w = torch.randn(n, n, device=run.device).bfloat16()
    found = run.times(
        {
            "forward": lambda: linear(x, w),
            "grad_input": lambda: dy @ w,
            "grad_weight": lambda: dy.t() @ x,
        },
        0.5,
    )
    for what, us in found.items():
        run.note("ceilings", f"dense {what}, {batch} samples", us,
                 expected=EXPECTED.get(f"dense {batch}"),
                 tflops=round(2 * batch * n * n / us / 1e6))  # fmt: skip
    if batch == run.sizes[1]:
        run.state["dense"] = found
        run.state["measured"]["16-bit"] = 2 * batch * n * n / found["forward"] * 1e6


def _float32(run: Run, n: int, batch: int) -> None:
    x, w = torch.randn(batch, n, device=run.device), torch.randn(n, n, device=run.device)
    before = torch.get_float32_matmul_precision()
    try:
        for name, precision in (("float32", "highest"), ("tf32", "high")):
            torch.set_float32_matmul_precision(precision)
            us = run.times({name: lambda: linear(x, w)}).get(name)
            if us:
                run.note("ceilings", f"dense forward in {name}", us,
                         expected=EXPECTED[f"dense {name}"])  # fmt: skip
                numbers = "tf32x3" if name == "float32" else name
                run.state["measured"][numbers] = 2 * batch * n * n / us * 1e6
                run.state[f"dense {name}"] = us
    finally:
        torch.set_float32_matmul_precision(before)


def _launches(run: Run) -> None:
    small = torch.zeros(64, device=run.device)
    run.note("ceilings", "host: launch of a torch operator", run.host(lambda: small.add_(1)),
             expected=EXPECTED["launch of a torch operator"])  # fmt: skip
    x, out = torch.zeros(64, device=run.device), torch.zeros(64, device=run.device)
    us = run.host(lambda: read_kernel[(1,)](x, out, 64, 1, BLOCK=64, num_warps=1))
    run.note("ceilings", "host: launch of a Triton kernel", us,
             expected=EXPECTED["launch of a Triton kernel"])  # fmt: skip


def rates(run: Run) -> Rates:
    """Those of the chip, as measured where they were."""
    row, found = rates_of(chip_of(run.device)), run.state["measured"]
    if run.dry:
        return row
    products = {name: found.get(name, rate) for name, rate in row.products.items()}
    tf32 = found.get("tf32", row.tensor["tf32"])
    return row._replace(
        products=products,
        tensor={"16-bit": products["16-bit"], "tf32": tf32, "tf32x3": tf32 / 3},
        cache=found.get("cache", row.cache),
        memory=found.get("memory", row.memory),
    )
