"""The tables of docs/popsparse-fidelity.md: what facts about a step change, and what memory needs.

    python benchmarks/fidelity.py              prints them (about ten minutes)
    python benchmarks/fidelity.py static 2     one of them, up to m = k = 2048

Everything is computed; nothing is measured or fitted. "Before" is the model without these facts:
126 cycles per superstep, and for static products sums spread evenly over the tiles at one vector
per cycle.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from dynsparse.pattern import SparsePattern
from popsparse import static
from popsparse.machine import Target
from popsparse.machine import target as facts
from popsparse.measure import dense_plans, run_plans
from popsparse.planning import static as static_cycles
from popsparse.planning.params import MatmulParams, SparsityParams
from popsparse.planning.search import matmul_plan
from popsparse.plans import predict
from popsparse.static_timing import code_bytes, tile_memory

BOW = Target.bow()
BEFORE = BOW.with_(sync_cycles=facts.SYNC.typical)
ENDS = {
    "low": BOW.with_(sync_cycles=facts.SUPERSTEP.low, local_copy_cycles=facts.COPY_LAUNCH.low),
    "typical": BOW,
    "high": BOW.with_(sync_cycles=facts.SUPERSTEP.high, local_copy_cycles=facts.COPY_LAUNCH.high),
}
BLOCKS, SIZES, DENSITIES = (1, 4, 8, 16), (1024, 2048, 4096), (4, 16, 32)
NAMED = ((4096, 1, 4, 1024), (8192, 1, 4, 256), (8192, 16, 16, 1024))


def drawn(size: int, block: int, density: int) -> SparsePattern:
    """A random pattern of density 1 / `density`."""
    generator = torch.Generator().manual_seed(0)
    return SparsePattern.random((size, size), 1 / density, block_size=block, generator=generator)


def static_plan(size: int, block: int, density: int, n: int) -> static.StaticPlan:
    return static.plan(drawn(size, block, density), n, "float16", BOW)


def static_before(plan: static.StaticPlan) -> float:
    """What `static.predict` returned before."""
    steps = {step.name: step for step in static.predict(plan).steps}
    found, size = plan.outputs, plan.dtype.size
    depth = plan.depths[found.row, found.part]
    received = np.bincount(found.tile, depth * found.length) * size
    sent = max(
        plan.pieces(part).rows.max() * n.size * plan.pattern.block_size * size
        for part, n in enumerate(plan.n_parts)
    )
    vectors = -(-found.length // (16 // size))
    total, partials = (np.bincount(found.tile, v) for v in (vectors, vectors * depth))
    added = static_cycles.reduce(total, partials, plan.dtype, plan.target.workers).max()
    moved = np.ceil(max(received.max(), sent) / plan.target.exchange_bytes_per_cycle)
    fixed = steps["gather operands"].exchange + steps["multiply"].compute
    return float(fixed + moved + (added if (depth > 1).any() else 0) + 2 * facts.SYNC.typical)


def row(names: list[object], before: float, found: list[float]) -> str:
    cells = [f"{before:,.0f}", *(f"{c:,.0f}" for c in found), f"{found[1] / before - 1:+.0%}"]
    return "| " + " | ".join([*map(str, names), *cells]) + " |"


def of_static(most: int = 4096, n: int = 256) -> Iterator[str]:
    """Static products at n = 256, predicted."""
    for block in BLOCKS:
        for size in (s for s in SIZES if s <= most):
            for density in DENSITIES:
                yield static_row(block, size, density, n)


def static_row(block: int, size: int, density: int, n: int = 256) -> str:
    plan = static_plan(size, block, density, n)
    found = [static.predict(replace(plan, target=target)).cycles for target in ENDS.values()]
    return row([block, size, f"1/{density}"], static_before(plan), found)


def of_dense(most: int = 4096) -> Iterator[str]:
    """Dense products, simulated."""
    for size, batches in ((1024, (4, 16, 64, 256, 1024)), (4096, (4, 16, 64, 256, 1024))):
        if size <= most:
            for n in batches:
                yield dense_row(size, n)


def dense_row(size: int, n: int) -> str:
    def cycles(target: Target) -> float:
        runs = run_plans(dense_plans(size, size, n, "float16", target), ignore_data=True)
        return runs["forward"].profile.cycles

    return row([size, n], cycles(BEFORE), [cycles(target) for target in ENDS.values()])


def of_dynamic(most: int = 4096) -> Iterator[str]:
    """Dynamic products at density 1/16, predicted."""
    for block in (1, 16):
        for size, n in ((1024, 64), (1024, 1024), (4096, 64), (4096, 1024)):
            if size <= most:
                yield dynamic_row(block, size, n)


def dynamic_row(block: int, size: int, n: int) -> str:
    params = MatmulParams(SparsityParams(block), 1 / 16, 1, size, size, n)
    plan = matmul_plan(BOW, "float16", params)
    pattern = drawn(size, block, 16)

    def cycles(target: Target) -> float:
        return predict(replace(plan, target=target), pattern)["forward"].cycles

    time = predict(plan, pattern)["forward"]
    turns = time.propagation_steps
    # Steps without an exchange counted as well: two of vertices after exchanges, two of control.
    syncs = sum(step.syncs for step in time.steps) + 6 * turns
    syncs += 1 + (plan.partition.y > 1) + 2 + (plan.partition.y == 1)
    before = time.compute_cycles + time.exchange_cycles + syncs * facts.SYNC.typical
    return row([block, size, n], before, [cycles(target) for target in ENDS.values()])


def of_memory(most: int = 8192) -> Iterator[str]:
    """The memory of three products."""
    for size, block, density, n in NAMED:
        if size <= most:
            yield memory_row(size, block, density, n)


def memory_row(size: int, block: int, density: int, n: int) -> str:
    """Data, code by kind, and their total at each end; then what a benchmark may also hold: float32
    copies of operands and result, and two unused memory elements of 32 KiB."""
    plan = static_plan(size, block, density, n)
    memory = tile_memory(plan)
    data = memory.needed - memory.code
    ends = {which: code_bytes(plan, which) for which in ENDS}
    kinds = [ends["typical"][name] for name in ends["typical"]]
    totals = [data + sum(parts.values()) for parts in ends.values()]
    copies = 4 * (2 * size * n + plan.pattern.nnz * block**2) // BOW.tiles
    worst = totals[-1] + copies + 2 * 32 * 1024
    cells = [data, *kinds, *totals, copies, worst, BOW.bytes_per_tile - worst]
    return "| " + " | ".join([str(size), str(block), str(n), *(f"{c:,}" for c in cells)]) + " |"


TABLES = {"static": of_static, "dense": of_dense, "dynamic": of_dynamic, "memory": of_memory}

if __name__ == "__main__":
    chosen = sys.argv[1:2] or list(TABLES)
    limits = [1024 * int(one) for one in sys.argv[2:3]]
    for table in chosen:
        print(f"\n{table}")
        for line in TABLES[table](*limits):
            print(line, flush=True)
