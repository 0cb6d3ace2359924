"""Data parallel training on one machine: is it exact, and what do updates cost?

    python benchmarks/many_processes.py exact --updates 1000 --ranks 2 --wrapper ddp
    python benchmarks/many_processes.py choices --updates 1000
    python benchmarks/many_processes.py instructions --updates 1000
    python benchmarks/many_processes.py cost --size 4096 --wrapper fsdp

`exact` trains every algorithm on gloo ranks and in one process, an update at every step, and
compares patterns and weights after each. `choices` compares only what grows, where rounding makes
the weights differ. `instructions` compares ranks whose kernels use different instruction sets.
`cost` times steps with and without an update, and the comparison of patterns alone.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dynsparse as ds
from dynsparse.ops.grow import topk_outside
from dynsparse.ranks import collective_errors, digest
from dynsparse.training import GMP, GraNet

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "distributed"), str(TESTS / "ranks")]

from data_parallel import instructions  # noqa: E402
from processes import on_ranks  # noqa: E402
from rank_trainings import (  # noqa: E402
    ALGORITHMS,
    EVERY,
    apart,
    backward,
    batch,
    layers_of,
    model_of,
    optimizer_of,
    weights,
)
from sharded_training import FIXED, shard, whole  # noqa: E402

# The algorithms with an update in every step, or every second one.
UPDATED = [name for name in ALGORITHMS if name != "static"]


def exact(rank: int, size: int, name: str, updates: int, wrapper: str) -> tuple[list[float], int]:
    """[steps with an update due; those after which patterns equal those of one process; the largest
    difference of weights; of optimizer state; updates that changed a pattern], and a digest of
    this rank's weights after each."""
    gradual = name in ("gmp", "gmp-global", "granet")
    options = {"total_steps": 4 * updates} if gradual else {}
    nets = [model_of(density=0.9 if gradual else 0.2) for _ in range(2)]
    if wrapper == "fsdp":
        forward, optimizers = shard(nets[0], size=size), [optimizer_of(net, "adam") for net in nets]
    else:
        optimizers = [optimizer_of(net) for net in nets]
        forward = DistributedDataParallel(nets[0])
    make = functools.partial(GRADUALLY[name], **options) if gradual else ALGORITHMS[name]
    trainers = [make(nets[0], optimizers[0]), make(nets[1], optimizers[1], ranks=None)]
    due, same, largest, state, seen, step = 0, 0, 0.0, 0.0, 0, 0
    while due < updates and step < 4 * updates:
        step += 1
        backward(forward, optimizers[0], step, rank, size)
        trainers[0].step()
        backward(nets[1], optimizers[1], step)
        trainers[1].step()
        if not trainers[0].schedule.is_due(step):
            continue
        due += 1
        found = weights(nets[0])
        equal, difference = apart(weights(nets[1]), found)
        same += equal
        largest = max(largest, difference)
        if equal:
            state = max(state, states_apart(nets, optimizers))
        seen = digest(str(seen), *(dense for _, dense in found.values()))
    return [due, same, largest, state, trainers[0].updates], seen


GRADUALLY = {
    "gmp": lambda m, o, **k: GMP(m, o, final_density=0.05, update_interval=2, **k),
    "gmp-global": lambda m, o, **k: GMP(
        m, o, final_density=0.05, update_interval=2, scope="global", **k
    ),
    "granet": lambda m, o, **k: GraNet(m, o, final_density=0.05, update_interval=2, **k),
}


def states_apart(nets: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> float:
    """The largest difference of the optimizers' states for sparse layers."""
    worst = 0.0
    for one, other in zip(*(layers_of(net).values() for net in nets), strict=True):
        for key, tensor in optimizers[1].state.get(other.values, {}).items():
            if isinstance(tensor, torch.Tensor) and tensor.dim():
                own = whole(optimizers[0].state[one.values][key])
                worst = max(worst, float((own - tensor).abs().max()))
    return worst


def choices(rank: int, size: int, kind: str, updates: int) -> list[int]:
    """[layers that grew, those that grew what one process chooses from the samples of all ranks, in
    float64, with the same weights].

    For trainings whose weights differ from those of one process by rounding: "float32", or "mixed",
    sharded with passes in bfloat16.
    """
    net = model_of(dtype=torch.float32)
    forward: nn.Module
    if kind == "mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        forward = shard(net, size=size, mp_policy=policy)
    else:
        forward = DistributedDataParallel(net)
    optimizer = optimizer_of(net)
    trainer = ds.RigL(net, optimizer, schedule=EVERY)
    grew = same = 0
    for step in range(1, updates + 1):
        x, y = batch(step, rank, size, dtype=torch.float32)
        optimizer.zero_grad()
        nn.functional.mse_loss(forward(x).float(), y).backward()
        own = {n: [(a.double(), b.double()) for a, b in p] for n, p in trainer._captures.items()}
        everyones: list[dict[str, list]] = [{} for _ in range(size)]
        torch.distributed.all_gather_object(everyones, own)
        for name, rewiring in (trainer.step() or {}).items():
            pairs = [pair for found in everyones for pair in found[name]]
            grown = rewiring.after.flat[rewiring.grown]
            expected = topk_outside(pairs, rewiring.before, len(grown)).flat.sort().values
            grew += 1
            same += torch.equal(grown, expected)
    return [grew, same]


def cost(
    rank: int, size: int, features: int, samples: int, updates: int, wrapper: str
) -> list[float]:
    """Median seconds of [a step, a step with an update, the comparison of patterns in it]."""
    g = torch.Generator().manual_seed(0)
    net = ds.nn.SparseLinear(features, features, 0.1, generator=g)
    if wrapper == "fsdp":
        fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    forward = net if wrapper == "fsdp" else DistributedDataParallel(net)
    schedule = ds.training.ConstantSchedule(10**6, 3, 0.3)
    trainer = ds.RigL(net, optimizer, schedule=schedule)
    x = torch.randn(samples, features, generator=g.manual_seed(rank))
    times: dict[bool, list[float]] = {False: [], True: []}
    for step in range(1, 3 * updates + 1):
        torch.distributed.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.mse_loss(forward(x), x).backward()
        updated = trainer.step() is not None
        if step > 3:
            times[updated].append(time.perf_counter() - begin)
    from dynsparse.training.rank_consistency import PatternComparison

    rewiring = ds.pattern.Rewiring.between(net.pattern, net.pattern)
    agreed = []
    for _ in range(updates):
        torch.distributed.barrier()
        begin = time.perf_counter()
        patterns = PatternComparison(trainer.ranks, 1, {"": rewiring})
        with collective_errors(trainer.ranks, patterns.numbers):
            pass
        patterns.compare()
        agreed.append(time.perf_counter() - begin)
    return [statistics.median(part) for part in (times[False], times[True], agreed)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["exact", "choices", "instructions", "cost"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--algorithms", nargs="*", default=UPDATED)
    parser.add_argument("--wrapper", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3600)
    given = parser.parse_args()
    if given.what == "cost":
        arguments = (given.size, given.samples, min(given.updates, 10), given.wrapper)
        found = on_ranks(given.ranks, cost, *arguments, seconds=given.seconds)
        step, update, agreement = map(max, zip(*found, strict=True))
        share = (update - step) / (100 * step + update - step)
        print(
            f"{given.wrapper}, {given.ranks} ranks, {given.size} x {given.size}, density 0.1, "
            f"{given.samples} samples each: a step {1e3 * step:.1f} ms, "
            f"an update {1e3 * (update - step):.1f} ms more, {100 * share:.2f} % of the time with "
            f"one in 100 steps; of that agreement {1e3 * agreement:.2f} ms, "
            f"{100 * agreement / (100 * step):.3f} %"
        )
        return
    if given.what == "choices":
        for kind in ("float32", "mixed"):
            found = on_ranks(given.ranks, choices, kind, given.updates, seconds=given.seconds)
            (grew, same), others = found[0], found[1:]
            assert all(other == [grew, same] for other in others)
            print(f"{kind:8s} {given.ranks} ranks: {same} of {grew} layers grew what one process "
                  "chooses", flush=True)  # fmt: skip
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
        if given.wrapper == "fsdp" and name not in FIXED:
            continue  # shards need a fixed number of values
        found = on_ranks(
            given.ranks, exact, name, given.updates, given.wrapper, seconds=given.seconds
        )
        due, _, _, _, updates = found[0][0]
        alike = min(one[1] for one, _ in found)
        largest, state = (max(one[i] for one, _ in found) for i in (2, 3))
        bits = "equal" if len({seen for _, seen in found}) == 1 else "DIFFERENT"
        print(
            f"{name:15s} {given.wrapper}, {given.ranks} ranks: {alike:.0f} of {due:.0f} updates as "
            f"in one process ({updates:.0f} changed something), weights within {largest:.1e}, "
            f"optimizer state {state:.1e}, ranks' bits {bits}",
            flush=True,
        )


if __name__ == "__main__":
    main()
