"""Whole training steps: sparse layers beside the same layers masked and dense."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dynsparse.nn import SparseLinear, SparseTransformerLayer
from gpu_parts.growth import peak
from gpu_parts.predictions import WANTED
from gpu_parts.run import Run

Step = Callable[[], object]


class Masked(nn.Linear):
    """A dense layer that computes with W * M."""

    mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.mask, self.bias)


def replaced(model: nn.Module, masked: bool) -> nn.Module:
    """A copy with every sparse layer dense, with its mask or without."""
    model = nn.Sequential(copy.deepcopy(model))
    for name, part in list(model.named_modules()):
        if isinstance(part, SparseLinear):
            kind = Masked if masked else nn.Linear
            made = kind(
                part.in_features, part.out_features, bias=part.bias is not None,
                device=part.values.device, dtype=part.values.dtype,
            )  # fmt: skip
            weight = part.to_dense().detach()
            made.weight = nn.Parameter(weight.to(part.values.device))
            if part.bias is not None:
                made.bias = part.bias
            if masked:
                made.register_buffer("mask", (made.weight != 0).to(made.weight.dtype))
            model.set_submodule(name, made)
    return model


def step_of(model: nn.Module, x: Tensor, dy: Tensor) -> Step:
    """Forward and backward, the gradient of the input too; gradients are written over."""

    def step() -> None:
        x.grad = None
        for parameter in model.parameters():
            parameter.grad = None
        model(x).backward(dy)

    return step


def captured(run: Run, step: Step) -> Step:
    """The step as a CUDA graph; the step itself where there are none."""
    if run.dry:
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


def _compare(
    run: Run, section: str, what: str, model: nn.Module, x: Tensor, dy: Tensor, wanted: str
) -> None:
    """Eager and captured, beside masked and dense."""
    models = {"sparse": model, "masked": replaced(model, True), "dense": replaced(model, False)}
    steps = {name: step_of(m, x, dy) for name, m in models.items()}
    for way in ("eager", "captured"):
        calls: dict[str, Step] = {}
        for name, step in steps.items():
            try:
                calls[name] = step if way == "eager" else captured(run, step)
            except Exception as problem:
                run.problem(f"{section} {what} {way} {name}", problem)
        times = run.times(calls, 1.0)
        if "sparse" in times and "masked" in times:
            against: dict[str, object] = {}
            if "dense" in times:
                against["to_dense"] = round(times["dense"] / times["sparse"], 2)
            if way == "eager":
                held = {name: peak(run, step) for name, step in steps.items()}
                against["megabytes"] = {name: round(held[name] / 1e6) for name in held}
                against["parameters"] = {
                    name: sum(p.numel() for p in model.parameters())
                    for name, model in models.items()
                }
            run.note(section, f"{what}, {way}, against masked", times["sparse"],
                     dense=times["masked"], wanted=WANTED.get(wanted), **against)  # fmt: skip


def steps(run: Run) -> None:
    n, batch, density = run.sizes
    for b in (64, 128, 32, 16, 1, 8, 4):
        layer = SparseLinear(n, n, density, b, device=run.device, dtype=torch.bfloat16)
        x = torch.randn(batch, n, device=run.device).bfloat16().requires_grad_()
        dy = torch.randn(batch, n, device=run.device).bfloat16()
        if not run.tries(f"step of blocks {b}"):
            continue
        kinds = (layer.kernel(batch), layer.kernel(batch, backward=True))
        name = "elements" if b == 1 else f"blocks {b}"
        _compare(run, "steps", f"{name} ({'/'.join(kinds)})", layer, x, dy, f"step {name}")
        if run.left() < 60:
            return


def transformer(run: Run) -> None:
    """A whole layer with attention, norms, gelu and biases, in bfloat16."""
    hidden, heads, tokens = (128, 2, (2, 16)) if run.dry else (4096, 32, (8, 1024))
    for b in (64,) if run.dry else (64, 128, 32):
        layer = SparseTransformerLayer(
            hidden, heads, 4 * hidden, dropout=0.0, density=0.1 if not run.dry else 0.5,
            block_size=b,
        )  # fmt: skip
        layer = layer.to(run.device).to(torch.bfloat16)
        x = torch.randn(*tokens, hidden, device=run.device).bfloat16().requires_grad_()
        dy = torch.randn(*tokens, hidden, device=run.device).bfloat16()
        _compare(run, "transformer", f"blocks of {b}", layer, x, dy,
                 f"transformer layer, blocks {b}")  # fmt: skip
        if run.left() < 60:
            return
