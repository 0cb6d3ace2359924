"""Predicted beside measured: a training step on every grid of some gloo ranks of this machine.

    python benchmarks/rank_grids.py --ranks 4 --features 1024 4096 1024 --batch 512

Each grid is planned with figures that the same ranks have measured a moment before, split, and
timed; grids take turns, so that what else the machine does falls on all of them. The prediction is
the mean of that by the figures of before and that by figures measured again afterwards. Says how
far it is off, and how far the grid that is predicted to be the fastest is from that which is.
"""

from __future__ import annotations

import argparse
import copy
import os
import socket
import statistics
import time
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dynsparse.distributed import Cluster, Plan, make_plan, measure, replicate, split
from dynsparse.distributed.search import Cost, grids
from dynsparse.nn import SparseLinear
from dynsparse.ranks import ranks_of


def model_of(options: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for into, out in pairwise(options.features):
        layers += [SparseLinear(into, out, options.density, options.block_size), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Contender:
    """One grid: the model on it, and what a step takes."""

    def __init__(self, options: argparse.Namespace, grid: Any, cluster: Cluster) -> None:
        names = ("z", "x", "y")
        mesh = init_device_mesh("cpu", (grid.z, grid.x, grid.y), mesh_dim_names=names)
        self.mesh, self.batch, self.whole = mesh, options.batch, model_of(options)
        self.plan: Plan = make_plan(self.whole, mesh, options.batch, cluster=cluster)
        model = split(copy.deepcopy(self.whole), mesh, self.plan)
        self.model: nn.Module = replicate(model, ranks=mesh["z"]) if grid.z > 1 else model
        self.optimizer = torch.optim.Adam(model.parameters())
        self.x = torch.randn(options.batch // grid.z, options.features[0], requires_grad=True)
        self.seconds: list[float] = []

    def told(self, clusters: list[Cluster]) -> list[Cost]:
        """What a step takes, by the figures of each cluster."""
        plans = [make_plan(self.whole, self.mesh, self.batch, cluster=one) for one in clusters]
        return [plan.chosen.cost for plan in plans]

    def step(self) -> None:
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        self.x.grad = None
        self.model(self.x).sum().backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - begin)


def run(rank: int, options: argparse.Namespace, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(options.ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    clusters = [measure()]
    contenders = [Contender(options, grid, clusters[0]) for grid in grids(options.ranks)]
    for _ in range(options.rounds):
        for contender in contenders:
            dist.barrier()
            contender.step()
    clusters.append(measure())
    ranks = ranks_of("auto")
    rows = []
    for contender in contenders:
        taken = torch.tensor([statistics.median(contender.seconds[1:])], dtype=torch.float64)
        told = contender.told(clusters)
        rows.append((str(contender.plan.grid), told, float(ranks.highest(taken))))
    if rank == 0:
        report(rows, clusters, options)
    dist.barrier()
    dist.destroy_process_group()


def seconds(costs: list[Cost]) -> float:
    """The mean of what the figures from before and after say."""
    return statistics.fmean(cost.seconds for cost in costs)


def report(rows: list[Any], clusters: list[Any], options: argparse.Namespace) -> None:
    for when, cluster in zip(("before", "after"), clusters, strict=True):
        print(
            f"{when}: latency {cluster.inner.latency * 1e6:.0f} us, "
            f"{cluster.inner.bandwidth / 1e9:.2f} GB/s, gathers {cluster.gathering:.2f} times half "
            f"a sum, passes {cluster.copying * 1e12:.0f} ps a byte, products "
            f"{cluster.slowness:.2f} times the constants of the kernels; load "
            f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        )
    print("| grid | predicted ms | measured ms | predicted / measured |\n|---|---|---|---|")
    rows.sort(key=lambda row: row[2])
    for grid, costs, taken in rows:
        told = seconds(costs)
        parts = ", ".join(
            f"{part} {statistics.fmean(getattr(cost, part) for cost in costs) * 1e3:.1f}"
            for part in ("products", "features", "weights", "optimizer")
        )
        print(f"| {grid} | {told * 1e3:.1f} ({parts}) | {taken * 1e3:.1f} | {told / taken:.2f} |")
    chosen = min(rows, key=lambda row: seconds(row[1]))
    print(
        f"the plan chooses {chosen[0]}, which takes {chosen[2] / rows[0][2]:.2f} of the fastest, "
        f"{rows[0][0]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--features", type=int, nargs="+", default=[1024, 4096, 1024])
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--block-size", type=int, default=1)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run, (options, port), options.ranks)


if __name__ == "__main__":
    main()
