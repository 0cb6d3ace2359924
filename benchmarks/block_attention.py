"""Block-sparse attention against masked dense attention, on this CPU.

    python benchmarks/block_attention.py [--tokens 1024 2048 4096] [--blocks 16 32 64]
        [--density 0.1] [--heads 8] [--features 64] [--threads 1 2] [--rounds 5]

Each length and block size gets a random pattern. Both compute the same: torch's attention with the
pattern as a bool mask, ours from the pattern. Rounds alternate. A line has the median seconds, and
the median and range of the ratios of neighbouring rounds, of forward and of forward plus backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import dynsparse as ds
from dynsparse.ops import block_sparse


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def ratios(
    dense: Callable[[], object], sparse: Callable[[], object], rounds: int
) -> tuple[float, float, list[float]]:
    """Median seconds of both, and dense / sparse in each round."""
    dense(), sparse()
    pairs = [(seconds(dense), seconds(sparse)) for _ in range(rounds)]
    return (
        statistics.median(d for d, _ in pairs),
        statistics.median(s for _, s in pairs),
        sorted(d / s for d, s in pairs),
    )


def line(what: str, measured: tuple[float, float, list[float]]) -> str:
    dense, sparse, found = measured
    return (
        f"{what}: masked {dense * 1e3:8.2f} ms, blocks {sparse * 1e3:8.2f} ms, "
        f"ratio {statistics.median(found):5.2f} ({found[0]:.2f} to {found[-1]:.2f})"
    )


def measure(tokens: int, block: int, options: argparse.Namespace) -> Sequence[str]:
    shape = (options.batch, options.heads, tokens, options.features)
    pattern = ds.SparsePattern.random((tokens, tokens), options.density, block_size=block)
    mask = pattern.to_mask()
    q, k, v = (torch.randn(shape) for _ in range(3))
    grad = torch.randn(shape)

    def both(attention: Callable[..., Tensor], how: object) -> tuple[Callable[[], object], ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]

        def forward() -> None:
            with torch.no_grad():
                attention(q, k, v, how)

        return forward, lambda: torch.autograd.grad(attention(*leaves, how), leaves, grad)

    dense = both(scaled_dot_product_attention, mask)
    sparse = both(block_sparse.scaled_dot_product_attention, pattern)
    names = ("forward", "forward and backward")
    return [
        line(f"{tokens} tokens, blocks of {block}, {name}", ratios(d, s, options.rounds))
        for name, d, s in zip(names, dense, sparse, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("tokens", [1024, 2048, 4096]),
        ("blocks", [16, 32, 64]),
        ("threads", [1, 2]),
    ):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default)
    parser.add_argument("--density", type=float, default=0.1)
    for name, default in (("batch", 1), ("heads", 8), ("features", 64), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    for threads in options.threads:
        torch.set_num_threads(threads)
        print(
            f"{threads} threads, density {options.density}, {options.heads} heads of "
            f"{options.features}, batch {options.batch}"
        )
        for tokens in options.tokens:
            for block in options.blocks:
                print(*measure(tokens, block, options), sep="\n", flush=True)


if __name__ == "__main__":
    main()
