"""Makes the layers that are asked for, plans, and tells."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from dynsparse.apps.plan_ranks.options import Options
from dynsparse.distributed import Cluster, Link, Plan, make_plan, measure
from dynsparse.files.whole import write_text_whole
from dynsparse.nn import SparseLinear, SparseMultiheadAttention

__all__ = ["run"]


class _Block(nn.Module):
    """What is planned for; nothing is computed with it."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        sparse: dict[str, Any] = {
            "density": options.density, "block_size": options.block_size, "generator": generator,
        }  # fmt: skip
        if options.heads is not None:
            first = options.features[0]
            self.attention = SparseMultiheadAttention(first, options.heads, **sparse)
        sizes = list(pairwise(options.features))
        for place, (into, out) in enumerate(sizes, 1):
            self.add_module(f"linear{place}", SparseLinear(into, out, **sparse))


def run(options: Options) -> Plan:
    """Plan, and say what was found; under torchrun on the first rank only."""
    options.check()
    group = _start() if options.measure is not None else None
    try:
        plan = _plan(options)
        first = group is None or torch.distributed.get_rank() == 0
        if first:
            _tell(options, plan)
    finally:
        if group is not None:
            torch.distributed.destroy_process_group()
    return plan


def _plan(options: Options) -> Plan:
    ranks = options.ranks
    if options.cluster is not None:
        cluster = Cluster.load(options.cluster)
    elif options.measure is not None:
        cluster, ranks = measure(), torch.distributed.get_world_size()
        if torch.distributed.get_rank() == 0:
            cluster.save(options.measure)
    else:
        cluster = _cluster(options)
    row = [f"linear{i}" for i in range(1, len(options.features))]
    return make_plan(
        _Block(options),
        ranks,
        options.batch_size,
        chains=[row],
        cluster=cluster,
        memory=options.memory,
        states=options.states,
    )


def _cluster(options: Options) -> Cluster:
    usual = Cluster()
    inner = Link(options.latency or usual.inner.latency, options.bandwidth or usual.inner.bandwidth)
    outer = None
    if options.outer_latency is not None or options.outer_bandwidth is not None:
        outer = Link(
            options.outer_latency or inner.latency, options.outer_bandwidth or inner.bandwidth
        )
    return Cluster(
        inner,
        outer,
        options.ranks_per_node,
        threads=options.threads or usual.threads,
        flops=options.flops,
    )


def _start() -> Any:
    """The process group of torchrun."""
    if "RANK" not in os.environ:
        raise ValueError(
            "--measure: expected ranks to measure: start it as torchrun --nproc-per-node 4 -m "
            "dynsparse.cli plan-ranks --measure FILE"
        )
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return torch.distributed.group.WORLD


def _tell(options: Options, plan: Plan) -> None:
    text = json.dumps(plan.to_dict())
    if str(options.json) == "-":
        print(text)
        return
    if options.json is not None:
        write_text_whole(options.json, text + "\n")
    print(plan.explain(options.top))
