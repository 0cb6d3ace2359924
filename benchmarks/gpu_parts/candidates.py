"""Configurations to measure beside those of the tables, by number format and block, and what
compiles them without a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dynsparse.ops.linear.cuda.chip import Numbers
from dynsparse.ops.linear.cuda.configurations import Gradient, Rows

ROWS: dict[Numbers, dict[int, tuple[Rows, ...]]] = {
    "16-bit": {
        16: (Rows(256, 64, 8, 3), Rows(128, 64, 4, 4), Rows(128, 64, 4, 3)),
        32: (
            Rows(256, 32, 4, 4), Rows(256, 64, 8, 2), Rows(128, 64, 4, 4),
            Rows(256, 32, 4, 4, tma=True),
        ),
        64: (
            Rows(128, 64, 4, 3), Rows(128, 64, 4, 4), Rows(256, 64, 8, 2), Rows(64, 64, 4, 4),
            Rows(128, 64, 4, 4, tma=True), Rows(256, 64, 8, 2, tma=True),
        ),
        128: (
            Rows(128, 64, 4, 3), Rows(128, 64, 8, 3), Rows(64, 64, 4, 3),
            Rows(128, 64, 8, 3, tma=True), Rows(256, 64, 8, 3, tma=True),
        ),
    },
    "tf32": {
        16: (Rows(128, 32, 8, 4), Rows(64, 32, 4, 3)),
        32: (Rows(128, 32, 4, 4), Rows(64, 32, 4, 3)),
        64: (Rows(128, 32, 8, 4), Rows(64, 32, 4, 3)),
        128: (Rows(64, 32, 4, 3), Rows(64, 32, 8, 3)),
    },
    "tf32x3": {
        16: (Rows(128, 32, 8, 4), Rows(64, 32, 4, 3)),
        32: (Rows(128, 32, 4, 4), Rows(64, 32, 4, 3)),
        64: (Rows(128, 32, 4, 4), Rows(128, 16, 8, 4)),
        128: (Rows(64, 32, 8, 3), Rows(64, 32, 4, 3), Rows(128, 16, 8, 3)),
    },
}  # fmt: skip

GRADIENT: dict[Numbers, dict[int, tuple[Gradient, ...]]] = {
    "16-bit": {
        16: (Gradient(8, 64, 4, 4), Gradient(16, 64, 8, 2)),
        32: (Gradient(4, 64, 4, 4), Gradient(8, 64, 8, 3)),
        64: (
            Gradient(2, 64, 4, 4), Gradient(4, 64, 8, 3), Gradient(2, 64, 4, 3, tma=True),
            Gradient(1, 64, 4, 4, tma=True), Gradient(2, 64, 4, 4, split=2, tma=True),
        ),
        128: (
            Gradient(1, 64, 8, 4), Gradient(1, 128, 8, 3, tma=True),
            Gradient(1, 64, 8, 3, split=2, tma=True), Gradient(2, 64, 8, 3, split=2, tma=True),
        ),
    },
    "tf32": {
        16: (Gradient(8, 32, 4, 4),),
        32: (Gradient(4, 32, 8, 3),),
        64: (Gradient(2, 32, 8, 4),),
        128: (Gradient(1, 32, 8, 3, split=2),),
    },
    "tf32x3": {
        16: (Gradient(8, 32, 4, 3),),
        32: (Gradient(4, 32, 4, 3), Gradient(4, 32, 8, 3)),
        64: (Gradient(2, 32, 8, 3), Gradient(2, 32, 4, 3)),
        128: (Gradient(1, 16, 8, 4), Gradient(1, 32, 8, 3, split=2)),
    },
}  # fmt: skip


class Compiles:
    """Stands in for a kernel of `launch`: compiles it without launching it, and appends it to
    `made`."""

    def __init__(self, kernel: Any, made: list) -> None:
        self.kernel, self.made, self.__name__ = kernel, made, kernel.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile_only(*args: Any, **options: Any) -> None:
            self.made.append(self.kernel.warmup(*args, grid=grid, **options))

        return compile_only
