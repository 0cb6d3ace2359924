"""The machine that figures belong to: processor, versions, load, precision of its products."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynsparse._core import native
from dynsparse._core.processor import processor

# user nice system irq softirq steal: the columns of /proc/stat in which a CPU is taken. Time that
# a hypervisor gave to others is as foreign as any.
_BUSY = (0, 1, 2, 5, 6, 7)


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds since some fixed moment: of the whole machine, taken by anyone, by ourselves."""

    total: float
    busy: float
    own: float


def read_cpu_times(
    stat: Path = Path("/proc/stat"), own: Callable[[], os.times_result] = os.times
) -> CpuTimes | None:
    """The times now; None where the system has no readable /proc/stat."""
    try:
        fields = stat.read_text().splitlines()[0].split()
        ticks = [int(field) for field in fields[1:9]]
    except (OSError, ValueError, IndexError):
        return None
    if fields[0] != "cpu" or len(ticks) < 8:
        return None
    second = os.sysconf("SC_CLK_TCK")
    mine = own()
    return CpuTimes(
        total=sum(ticks) / second,
        busy=sum(ticks[column] for column in _BUSY) / second,
        own=mine.user + mine.system,
    )


def foreign_share(before: CpuTimes | None, after: CpuTimes | None) -> float | None:
    """The share, in [0, 1], of the machine's CPU time that others took between two readings.

    None where it is not known: no readings, or so close together that no tick lies between.
    Readings come in ticks of 10 ms, so spans below half a second say little.
    """
    if before is None or after is None or after.total <= before.total:
        return None
    foreign = (after.busy - before.busy) - (after.own - before.own)
    return min(1.0, max(0.0, foreign / (after.total - before.total)))


# Between the relative errors of products of float32, below 1e-6, and of bfloat16, above 1e-3.
_ERROR_LIMIT = 3e-5


@contextmanager
def medium_precision() -> Iterator[None]:
    """A context with what `torch.set_float32_matmul_precision("medium")` sets for CPUs.

    oneDNN computes the products then, and may round what it multiplies to bfloat16. From torch 2.9
    on the setting has a place of its own, and is as it was afterwards; by the function it would not
    be, and would be refused to those who use both.
    """
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is not None and hasattr(matmul, "fp32_precision"):
        before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
        try:
            yield
        finally:
            matmul.fp32_precision = before
        return
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def medium_product_dtype() -> str:
    """The type in which this processor multiplies at medium precision: "bfloat16" or "float32"."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 256, 256, generator=generator)
    with medium_precision():
        return product_dtype(x @ w, x, w)


def product_dtype(product: Tensor, x: Tensor, w: Tensor) -> str:
    """The type in which x @ w of float32 was computed, by its error: "bfloat16" or "float32"."""
    exact = x.double() @ w.double()
    return "bfloat16" if (product - exact).norm() > _ERROR_LIMIT * exact.norm() else "float32"


def describe_host() -> dict[str, Any]:
    """The machine's processor, versions and load, in plain types for JSON."""
    kernels = native.describe()
    return {
        "processor": processor().name,
        "cores": os.cpu_count(),
        "kernels": kernels["backend"],
        "isa": kernels["isa"],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_known": read_cpu_times() is not None,
        "mkl": torch.backends.mkl.is_available(),
        "medium": medium_product_dtype(),
        "versions": {name: _version(name) for name in ("dynsparse", "torch", "numpy", "scipy")},
    }


def _version(name: str) -> str:
    if name == "torch":
        return torch.__version__  # with the build, such as +cpu
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "source tree"
