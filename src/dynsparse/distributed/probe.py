"""Measures what a sum over ranks costs, and how fast the ranks compute while all of them do."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dynsparse.distributed.cluster import Cluster, Link
from dynsparse.nn import SparseLinear
from dynsparse.ops.linear.costs import Layer
from dynsparse.ranks import Ranks, Slab, ranks_of

__all__ = ["measure"]

SIZES = (1 << 8, 1 << 12, 1 << 16, 1 << 18, 1 << 20)  # float32 numbers of a sum
SECONDS = 0.2  # of each of the eleven medians
FEATURES, SAMPLES, DENSITY = 1024, 256, 0.1
PASSES = 6


def measure(group: Any = "auto") -> Cluster:
    """The figures of the ranks of a process group, for `make_plan`; takes about two seconds.

    Sums of several sizes give latency and bandwidth by least squares, and gathers as layers make
    them how much longer these take; a sparse layer on all ranks at once how long products take
    beside the constants of `ops.linear.costs`, and a ReLU passes over activations. Under torchrun
    on several nodes (LOCAL_WORLD_SIZE) inside and between nodes are measured apart. The same on
    all ranks, who call this at the same time. `Cluster.save` keeps it.

    Args:
        group: a process group, or a mesh of one dimension; all ranks if left out.

    Raises:
        TypeError: something else.
    """
    ranks = ranks_of(group)
    cluster = _speed(ranks)
    if ranks.alone:
        return cluster
    cluster = dataclasses.replace(cluster, gathering=_of_first(ranks, [_gathering(ranks)])[0])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0") or 0)
    if 1 < local < ranks.size and ranks.size % local == 0 and group == "auto":
        near, far = _lines(local, ranks)
        inner, outer = (Link(*_of_first(ranks, _link(line))) for line in (near, far))
        return dataclasses.replace(cluster, inner=inner, outer=outer, ranks_per_node=local)
    return dataclasses.replace(cluster, inner=Link(*_of_first(ranks, _link(ranks))))


def _of_first(ranks: Ranks, figures: Sequence[float]) -> list[float]:
    """What the first rank has found: least squares are not the same bits everywhere."""
    found: list[float] = ranks.broadcast(
        torch.tensor(figures, dtype=torch.float64, device=ranks.device)
    ).tolist()
    return found


def _lines(local: int, ranks: Ranks) -> tuple[Ranks, Ranks]:
    """Those of this rank's node, and those at the same place of each node."""
    from torch.distributed.device_mesh import init_device_mesh  # loads half of torch

    mesh = init_device_mesh(
        ranks.device.type, (ranks.size // local, local), mesh_dim_names=("far", "near")
    )
    return ranks_of(mesh["near"]), ranks_of(mesh["far"])


def _link(ranks: Ranks) -> Link:
    """Fitted to the medians of sums of several sizes."""
    hops = 2 * math.ceil(math.log2(ranks.size))
    share = 2 * (ranks.size - 1) / ranks.size
    rows, seconds = [], []
    for size in SIZES:
        tensor = torch.zeros(size, device=ranks.device)
        seconds.append(_median(ranks, partial(ranks.sum, tensor)))
        rows.append([hops, share * tensor.nbytes])
    # Weighted, so that small messages count as much as large ones.
    weights = torch.tensor(seconds, dtype=torch.float64).reciprocal()
    matrix = torch.tensor(rows, dtype=torch.float64) * weights[:, None]
    latency, inverse = torch.linalg.lstsq(matrix, torch.ones(len(rows), 1).double()).solution
    # Of the largest message half the time at least is its bytes'; where others were disturbed the
    # line through all would have it otherwise.
    least = 0.5 * seconds[-1] / rows[-1][1]
    return Link(max(float(latency), 1e-9), 1 / max(float(inverse), least))


def _gathering(ranks: Ranks) -> float:
    """How long gathers of activations take, of half a sum of as many bytes."""
    found = []
    for size in (1 << 16, 1 << 20):
        width = max(1, size // SAMPLES // ranks.size)
        own = torch.zeros(SAMPLES, width, device=ranks.device)
        slab = Slab(ranks, tuple(range(0, (ranks.size + 1) * width, width)))
        gather = _median(ranks, partial(slab.joined, own, -1))
        whole = own.new_zeros(own.numel() * ranks.size)
        found.append(2 * gather / _median(ranks, partial(ranks.sum, whole)))
    return statistics.geometric_mean(found)


def _speed(ranks: Ranks) -> Cluster:
    """What the ranks compute, while all of them do."""
    generator = torch.Generator().manual_seed(0)
    layer = SparseLinear(FEATURES, FEATURES, DENSITY, generator=generator, device=ranks.device)
    x = torch.randn(SAMPLES, FEATURES, device=ranks.device, requires_grad=True)
    dy = torch.ones(SAMPLES, FEATURES, device=ranks.device)
    seconds = _median(ranks, lambda: layer(x).backward(dy))
    copying = _copying(ranks)
    if ranks.device.type != "cpu":
        return Cluster(flops=6 * layer.pattern.nnz * SAMPLES / seconds, copying=copying)
    shape = Layer(FEATURES, FEATURES, layer.pattern.nnz, 1)
    even = Cluster(threads=torch.get_num_threads())
    told = sum(even.pass_seconds(shape, SAMPLES, backward=b) for b in (False, True))
    return dataclasses.replace(even, slowness=seconds / told, copying=copying)


def _copying(ranks: Ranks) -> float:
    """Seconds of a pass over a byte of activations. All are kept until the last is made, as they
    are until backward: the system hands out and takes back memory, which is a part of it."""
    first = torch.zeros(SAMPLES, 4 * FEATURES, device=ranks.device)

    def passes() -> None:
        kept = [first]
        while len(kept) <= PASSES:
            kept.append(torch.relu(kept[-1]))

    return _median(ranks, passes) / (PASSES * first.nbytes)


def _median(ranks: Ranks, work: Callable[[], Any]) -> float:
    """Seconds, of the slowest rank; all ranks do it equally often."""
    for _ in range(2):
        work()
    once = _time(work)
    longest = float(ranks.highest(torch.tensor([once], dtype=torch.float64)))
    rounds = max(7, min(200, int(SECONDS / max(longest, 1e-6))))
    taken = sorted(_time(work) for _ in range(rounds))
    return float(ranks.highest(torch.tensor([taken[rounds // 2]], dtype=torch.float64)))


def _time(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin
