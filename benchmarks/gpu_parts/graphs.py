"""What was captured before a pattern changed computes with the pattern of after."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

import dynsparse as ds
from dynsparse.nn import SparseLinear
from gpu_parts.layers import captured
from gpu_parts.run import Run

# Steps between updates; those that end in one run eagerly.
INTERVAL, STEPS = 4, 12


def measure(run: Run) -> None:
    for what, follows in (
        ("a captured forward after another pattern was set", _forward),
        ("a captured training over updates of RigL", _training),
    ):
        if not run.tries(what):
            continue
        try:
            same = follows(run)
        except Exception as problem:
            run.problem(what, problem)
            run.wait()  # raises where the device is lost
            same = False
        run.note("graphs", what, right="yes" if same else "NO")
        if not same:
            run.state["wrong"] = run.state.get("wrong", 0) + 1


def _forward(run: Run) -> bool:
    """A captured step computes with the pattern of the day, not with that of its capture."""
    n, batch, density = run.sizes
    layer = SparseLinear(n, n, density, 64, device=run.device, dtype=torch.bfloat16)
    x = torch.randn(batch, n, device=run.device).bfloat16()
    kept: list[Tensor] = []

    def step() -> None:
        kept[:] = [layer(x)]

    with torch.no_grad():
        replay = captured(run, step)
        kept_by_graph = kept[0] if kept else None
        twin = SparseLinear(n, n, density, 64, device=run.device, dtype=torch.bfloat16)
        layer.set_pattern(twin.pattern)
        layer.values.copy_(twin.values)
        layer.bias.copy_(twin.bias)
        replay()
        run.wait()
        got = kept[0] if run.dry or kept_by_graph is None else kept_by_graph
        return torch.equal(got, twin(x))


def _training(run: Run) -> bool:
    """Steps replayed and updates in between, beside the same steps without a graph."""
    n, batch, density = run.sizes
    layer = SparseLinear(n, n, density, 64, device=run.device)
    twin = copy.deepcopy(layer)
    x, y = (torch.randn(batch, n, device=run.device).bfloat16() for _ in range(2))
    trainers, steps = [], []
    for one in (layer, twin):
        optimizer = torch.optim.Adam(one.parameters(), lr=1e-3, capturable=not run.dry)
        trainers.append(ds.RigL(one, optimizer, total_steps=10**6, update_interval=INTERVAL))
        steps.append(_gradients(one, optimizer, x, y))
    own, other = trainers
    for _ in range(STEPS):
        steps[1]()
        other.step()
    for _ in range(INTERVAL):  # to warm up, and to its first update
        steps[0]()
        own.step()

    def whole() -> None:
        steps[0]()
        own.optimizer.step()

    replay = None if run.dry else _graph(whole)
    while own.steps < STEPS:
        if replay is None or own.schedule.is_due(own.steps + 1):
            steps[0]()
            own.step()
        else:
            replay()
            own.after_optimizer_step()
    run.wait()
    wanted = twin.values.detach()
    off = float((layer.values.detach() - wanted).norm() / wanted.norm())
    print(f"graphs: {own.updates} updates, off by {off:.1e}", flush=True)
    return own.updates == other.updates and layer.pattern == twin.pattern and off < 1e-3


def _gradients(
    layer: SparseLinear, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> Callable[[], None]:
    def gradients() -> None:
        optimizer.zero_grad()
        (layer(x).float() - y.float()).square().mean().backward()

    return gradients


def _graph(step: Callable[[], None]) -> Callable[[], None]:
    """One more step as a graph, which does not take it yet."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
