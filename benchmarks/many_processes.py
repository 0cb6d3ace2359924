"""Data parallel training on this machine: is it exact, and what do updates cost?

    python benchmarks/many_processes.py exact --updates 1000 --ranks 2
    python benchmarks/many_processes.py instructions --updates 1000
    python benchmarks/many_processes.py cost --size 4096

`exact` trains every algorithm on gloo ranks and in one process, an update at every step, and
compares patterns and weights after each. `instructions` does it with ranks whose kernels are of
different instruction sets. `cost` times steps with and without an update, and the agreement alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dynsparse as ds

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "distributed"), str(TESTS / "ranks")]

from data_parallel import instructions  # noqa: E402
from processes import on_ranks  # noqa: E402
from rank_trainings import ALGORITHMS, apart, backward, model_of, optimizer_of, weights  # noqa: E402

# What changes in every step, or in every second.
UPDATED = [name for name in ALGORITHMS if name != "static"]


def exact(rank: int, size: int, name: str, updates: int) -> list[float]:
    """[updates made, those after which patterns were as in one process, the largest difference]."""
    nets = [model_of(), model_of()]
    optimizers = [optimizer_of(net) for net in nets]
    trainers = [
        ALGORITHMS[name](nets[0], optimizers[0]),
        ALGORITHMS[name](nets[1], optimizers[1], ranks=None),
    ]
    ddp = DistributedDataParallel(nets[0])
    same, largest, step = 0, 0.0, 0
    while trainers[0].updates < updates and step < 2 * updates:
        step += 1
        before = trainers[0].updates
        backward(ddp, optimizers[0], step, rank, size)
        trainers[0].step()
        backward(nets[1], optimizers[1], step)
        trainers[1].step()
        if trainers[0].updates > before:
            equal, difference = apart(weights(nets[0]), weights(nets[1]))
            same += equal
            largest = max(largest, difference)
    return [trainers[0].updates, same, largest]


def cost(rank: int, size: int, features: int, samples: int, updates: int) -> list[float]:
    """Medians in seconds: [a step, a step that ends in an update, its agreement on patterns]."""
    g = torch.Generator().manual_seed(0)
    net = ds.nn.SparseLinear(features, features, 0.1, generator=g)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    ddp = DistributedDataParallel(net)
    schedule = ds.training.ConstantSchedule(10**6, 3, 0.3)
    trainer = ds.RigL(net, optimizer, schedule=schedule)
    x = torch.randn(samples, features, generator=g.manual_seed(rank))
    times: dict[bool, list[float]] = {False: [], True: []}
    for step in range(1, 3 * updates + 1):
        torch.distributed.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), x).backward()
        updated = trainer.step() is not None
        if step > 3:
            times[updated].append(time.perf_counter() - begin)
    from dynsparse.training.together import agree_on_patterns

    rewiring = ds.Rewiring.between(net.pattern, net.pattern)
    agreed = []
    for _ in range(updates):
        torch.distributed.barrier()
        begin = time.perf_counter()
        agree_on_patterns(trainer.ranks, 1, {"": rewiring})
        agreed.append(time.perf_counter() - begin)
    return [statistics.median(part) for part in (times[False], times[True], agreed)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["exact", "instructions", "cost"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--algorithms", nargs="*", default=UPDATED)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3600)
    given = parser.parse_args()
    if given.what == "cost":
        arguments = (given.size, given.samples, min(given.updates, 10))
        found = on_ranks(given.ranks, cost, *arguments, seconds=given.seconds)
        step, update, agreement = map(max, zip(*found, strict=True))
        share = (update - step) / (100 * step + update - step)
        print(
            f"{given.ranks} ranks, {given.size} x {given.size}, density 0.1, {given.samples} "
            f"samples each: a step {1e3 * step:.1f} ms, an update {1e3 * (update - step):.1f} ms "
            f"more, {100 * share:.2f} % of the time with one in 100 steps; of that agreement "
            f"{1e3 * agreement:.2f} ms, {100 * agreement / (100 * step):.3f} %"
        )
        return
    isas = (["v2", "v4"] * given.ranks)[: given.ranks]
    for name in given.algorithms:
        if given.what == "instructions":
            ends = on_ranks(
                given.ranks, instructions, name, given.updates, isas, seconds=given.seconds
            )
            alike = all(torch.equal(e[2][n], ends[0][2][n]) for e in ends for n in e[2])
            kinds = " and ".join(end[0] for end in ends)
            print(f"{name:15s} {kinds}: patterns {'agree' if alike else 'DIFFER'} after "
                  f"{ends[0][1]} updates", flush=True)  # fmt: skip
            continue
        found = on_ranks(given.ranks, exact, name, given.updates, seconds=given.seconds)
        updates = found[0][0]
        worst = max(one[2] for one in found)
        alike = min(one[1] for one in found)
        print(
            f"{name:15s} {given.ranks} ranks: {alike:.0f} of "
            f"{updates:.0f} updates as in one process, weights within {worst:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
