"""Does the number of threads change a result, and what do more of them bring?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dynsparse.ops.linear import linear
from dynsparse.ops.linear.choice import use_kernel
from dynsparse.pattern import SparsePattern
from dynsparse.selfcheck.result import Check, checked

__all__ = ["check_threads", "thread_counts", "with_threads"]


def thread_counts() -> list[int]:
    """1, 2, 4 and so on up to those that torch takes, which are the last."""
    most = torch.get_num_threads()
    return [*(2**e for e in range(most.bit_length()) if 2**e < most), most]


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """torch computes on so many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_threads(generator: torch.Generator) -> Iterator[Check]:
    """The sparse kernels give the same bits on any number of threads."""
    for block in (1, 16):
        pattern = SparsePattern.random((768, 512), 0.2, block_size=block, generator=generator)
        values = torch.randn(pattern.values_shape, generator=generator)
        x = torch.randn(256, 512, generator=generator)
        dy = torch.randn(256, 768, generator=generator)
        results: dict[int, list[torch.Tensor]] = {}

        def differing(
            count: int,
            pattern: SparsePattern = pattern,
            values: torch.Tensor = values,
            x: torch.Tensor = x,
            dy: torch.Tensor = dy,
            results: dict[int, list[torch.Tensor]] = results,
        ) -> float:
            ours = [t.clone().requires_grad_() for t in (x, values)]
            with with_threads(count), use_kernel("sparse"):
                y = linear(ours[0], ours[1], pattern)
                y.backward(dy)
            found = [y.detach(), *(t.grad for t in ours if t.grad is not None)]
            first = results.setdefault(1, found)
            return float(sum(int((a != b).sum()) for a, b in zip(found, first, strict=True)))

        what = "elements" if block == 1 else f"blocks of {block}"
        for count in thread_counts():
            yield checked(
                "threads", str(count), what, 0.0,
                lambda count=count: differing(count),  # type: ignore[misc]
            )  # fmt: skip
