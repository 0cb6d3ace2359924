"""What the machine reaches: bytes from memory, and arithmetic."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from dynsparse.selfcheck.result import Speed
from dynsparse.selfcheck.threads import with_threads

__all__ = ["measure_speeds"]

_BYTES = 128 << 20
_SIZES = {"cpu": 1024, "cuda": 8192}
_TYPES = (torch.float64, torch.float32, torch.bfloat16)


def measure_speeds(device: torch.device, name: str, threads: list[int]) -> Iterator[Speed]:
    """The best of some runs of a copy and of a square product, with each number of threads.

    A copy counts what it reads and what it writes.
    """
    for count in threads:
        with with_threads(count):
            source = torch.ones(_BYTES // 8, dtype=torch.float64, device=device)
            target = torch.zeros_like(source)
            taken = _best(lambda s=source, t=target: t.copy_(s), device)  # type: ignore[misc]
            yield Speed(name, "memory", count, 2 * _BYTES / taken / 1e9, "GB/s")
            del source, target
            for dtype in _TYPES:
                size = _SIZES[device.type]
                a = torch.ones(size, size, dtype=dtype, device=device)
                taken = _best(lambda a=a: a @ a, device)  # type: ignore[misc]
                what = str(dtype).removeprefix("torch.")
                yield Speed(name, what, count, 2 * size**3 / taken / 1e9, "GFLOP/s")


def _best(run: Callable[[], object], device: torch.device, seconds: float = 0.25) -> float:
    """The shortest of at least three runs, and of as many as there is time for."""

    def once() -> float:
        before = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - before

    once()
    best = once()
    end = time.perf_counter() + seconds
    runs = 1
    while time.perf_counter() < end or runs < 3:
        best = min(best, once())
        runs += 1
    return best
