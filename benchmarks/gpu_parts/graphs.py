"""CUDA graphs captured before a pattern update compute with the updated pattern."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

import dynsparse as ds
from dynsparse.nn import SparseLinear
from gpu_parts.data import error
from gpu_parts.run import Run

# Steps between updates, and in all; steps with an update run eagerly.
INTERVAL, STEPS = 4, 12


def captured(run: Run, step: Callable[[], object]) -> Callable[[], object]:
    """The step as a CUDA graph; on a CPU the step itself."""
    if run.interpreted:
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def captured_training(run: Run, b: int) -> float:
    """Train with replayed steps and RigL updates in between; return the error of the weights
    relative to the same steps without a graph."""
    n, batch = (256, 64) if run.small else (1024, 512)
    layer = SparseLinear(n, n, 0.2, b, device=run.device)
    twin = copy.deepcopy(layer)
    x, y = (torch.randn(batch, n, device=run.device).bfloat16() for _ in range(2))
    trainers, steps = [], []
    for one in (layer, twin):
        optimizer = torch.optim.Adam(one.parameters(), lr=1e-3, capturable=not run.interpreted)
        trainers.append(ds.RigL(one, optimizer, total_steps=10**6, update_interval=INTERVAL))
        steps.append(_gradients(one, optimizer, x, y))
    own, other = trainers
    for _ in range(STEPS):
        steps[1]()
        other.step()
    for _ in range(INTERVAL):  # warm-up, up to the first update
        steps[0]()
        own.step()

    def whole() -> None:
        steps[0]()
        own.optimizer.step()

    replay: Callable[[], None] | None = None
    if not run.interpreted:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            whole()
        replay = graph.replay
    while own.steps < STEPS:
        if replay is None or own.schedule.is_due(own.steps + 1):
            steps[0]()
            own.step()
        else:
            replay()
            own.after_optimizer_step()
    run.wait()
    if own.updates != other.updates or layer.pattern != twin.pattern:
        return float("inf")
    return error(layer.values.detach(), twin.values.detach())


def _gradients(
    layer: SparseLinear, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> Callable[[], None]:
    def gradients() -> None:
        optimizer.zero_grad()
        (layer(x).float() - y.float()).square().mean().backward()

    return gradients
