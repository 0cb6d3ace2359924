"""Correctness of every kernel against float64.

Covers what users run: all three passes and the bias sums of each block size, one sample and ragged
batches, float32 values with 16-bit activations, operands at odd strides and addresses; growth
scores, a pattern update, a captured step and one that torch.compile captures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import dynsparse as ds
from dynsparse.nn import SparseConv2d, SparseLinear
from dynsparse.ops import use_kernel
from dynsparse.ops.grow import topk_outside
from dynsparse.ops.linear.cuda import blocks, dense, launch
from gpu_parts.data import Data, error
from gpu_parts.graphs import captured_training
from gpu_parts.run import Run

HALF = torch.bfloat16
DTYPES = (torch.float32, HALF, torch.float16)


LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6, HALF: 6e-3, torch.float16: 1e-3}
"""Largest error relative to the norm. 16-bit results are rounded once."""


def check_blocks(run: Run, b: int) -> None:
    """The kernels over blocks of `b`, and products with the values as a dense weight."""
    n = 4 * b if run.small else 1024
    batches = (70, 1) if run.small else (1000, 1)
    for dtype, batch in itertools.product(DTYPES, batches):
        d = Data(run.device, n, batch, 0.4, b, dtype, out=n - b)
        _check(run, f"{b} {_name(dtype)} batch {batch}", d)
    for lie in ("transposed", "expanded", "odd address", "odd stride"):
        d = Data(run.device, n, batches[0], 0.4, b, HALF)
        d.x, d.dy = _laid(d.x, lie), _laid(d.dy, lie)
        _check(run, f"{b} {lie}", d)
    d = Data(run.device, n, batches[0], 0.4, b, HALF, shuffled=True)
    d.values = torch.randn(d.values.shape, device=run.device)
    _check(run, f"{b} float32 values in slots of any order", d)
    for terms in () if run.small else (128, 1024, 8192):
        d = Data(run.device, 512, terms, 0.4, b, torch.float32)
        wanted = d.collected(d.dy.double().t() @ d.x.double())

        def sums(d: Data = d, wanted: Tensor = wanted) -> list[float]:
            return [error(launch.grad_weight(d.dy, d.x, d.p, torch.float32), wanted)]

        _report(run, f"{b} float32 sums of {terms}", sums, LIMITS[torch.float32])


def check_updates(run: Run) -> None:
    """Growth, pattern updates, and graphs captured before an update."""
    for b, dtype in itertools.product((1, 4, 16, 64, 128), (torch.float64, *DTYPES)):
        limit = LIMITS[dtype]
        name = f"growth scores of blocks of {b}, {_name(dtype)}"
        _report(run, name, lambda b=b, dtype=dtype: [_growth(run, b, dtype)], limit)
    for b in (1, 64):
        _report(run, f"an update of RigL, blocks of {b}", lambda b=b: _update(run, b), 1e-4)
        name = f"a captured training over updates, blocks of {b}"
        _report(run, name, lambda b=b: [captured_training(run, b)], 1e-3)


def check_compiled(run: Run) -> None:
    """Steps that torch.compile captures, of newly built layers."""
    n = 64 if run.small else 1024
    for b in (64, 1):
        layer = SparseLinear(n, n, 0.3, b, device=run.device, dtype=HALF)
        x = torch.randn(512, n, device=run.device)
        name = f"compiled with reduce-overhead, blocks of {b}"
        _report(run, name, lambda layer=layer, x=x: _compiled(run, layer, x), 1e-2)
    convolution = SparseConv2d(16, 32, 3, density=0.3, device=run.device, dtype=HALF)
    x = torch.randn(8, 16, 20, 20, device=run.device)
    name = "compiled with reduce-overhead, a convolution"
    _report(run, name, lambda: _compiled(run, convolution, x), 1e-2)


def _check(run: Run, name: str, d: Data) -> None:
    """All passes, each twice: results must be bitwise equal."""
    weight, x, dy = d.dense(d.values.to(d.x.dtype).double()), d.x.double(), d.dy.double()
    dw = d.collected(dy.t() @ x)
    wanted = {
        "forward": [linear(x, weight, d.bias.double())],
        "grad_input": [dy @ weight],
        "grad_weight": [dw],
        "grad_weight with bias": [dw, dy.sum(0)],
    }
    limit = LIMITS[d.x.dtype]
    for way, kind in (("blocks", blocks), ("dense", dense)):
        errors: list[float] = []
        for what, call in _passes(kind, d).items():
            pairs = run.case(f"{name} {what} by {way}", lambda call=call: (call(), call()))
            if pairs is None:
                continue
            found = [error(*pair) for pair in zip(pairs[0], wanted[what], strict=True)]
            same = all(map(torch.equal, *pairs))
            if not same or not all(off < limit for off in found):
                run.state["wrong"].append(f"{name} {what} by {way}")
            errors += found if same else [float("inf")]
        run.note(f"{name} by {way}", errors=_rounded(errors),
                 right=all(off < limit for off in errors))  # fmt: skip


def _passes(kind: ModuleType, d: Data) -> dict[str, Callable[[], list[Tensor]]]:
    def backward(need_input: bool, **more: list[Tensor]) -> list[Tensor]:
        found = kind.backward(d.dy, d.x, d.values, d.p, need_input, not need_input, **more)
        return [t for t in (*found, *more.get("sums", [])) if t is not None]

    passes = {
        "forward": lambda: [kind.forward(d.x, d.values, d.p, d.bias)],
        "grad_input": lambda: backward(True),
        "grad_weight": lambda: backward(False),
    }
    if kind is blocks and d.x.element_size() == 2:
        passes["grad_weight with bias"] = lambda: backward(False, sums=[])
    return passes


def _growth(run: Run, b: int, dtype: torch.dtype) -> float:
    """Error of the best scores on the device relative to those on the CPU."""
    d = Data(torch.device("cpu"), 512, 256, 0.2, b, dtype)
    k = max(1, (d.pattern.total - d.pattern.nnz) // 4)
    here = topk_outside([(d.x, d.dy)], d.pattern, k)
    there = topk_outside([(d.x.to(run.device), d.dy.to(run.device))], d.pattern, k)
    return error(there.scores.cpu(), here.scores)


def _update(run: Run, b: int) -> list[float]:
    """Errors of one update on the device relative to the CPU, in float64: of two layers of equal
    sizes and one of others."""
    weights = []
    for device in (torch.device("cpu"), run.device):
        torch.manual_seed(0)
        sizes = [(256, 512), (512, 256), (256, 512)]
        net = nn.Sequential(*(SparseLinear(*size, 0.2, b, dtype=torch.float64) for size in sizes))
        net = net.to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        trainer = ds.RigL(net, optimizer, total_steps=100, update_interval=2)
        x, dy = torch.randn(64, 256).double(), torch.randn(64, 512).double()
        for _ in range(4):
            net(x.to(device)).backward(dy.to(device))
            trainer.step()
            optimizer.zero_grad()
        weights.append([layer.to_dense().detach().cpu() for layer in net])
    return [error(*pair) for pair in zip(*weights[::-1], strict=True)]


def _compiled(run: Run, layer: nn.Module, x: Tensor) -> list[float]:
    """A replayed step, after warm-up and capture, beside an eager one; on a CPU only traced."""
    x = x.to(HALF).requires_grad_()
    how = {"backend": "aot_eager"} if run.interpreted else {"mode": "reduce-overhead"}
    compiled = torch.compile(layer, **how)
    found: list[list[Tensor]] = []
    with use_kernel("blocks"):
        for model in (compiled, compiled, compiled, layer):
            layer.zero_grad()
            x.grad = None
            y = model(x)
            y.square().mean().backward()
            parts = (y.detach(), x.grad, layer.values.grad, layer.bias.grad)
            found.append([part.clone() for part in parts])
    return [error(got, wanted) for got, wanted in zip(found[2], found[3], strict=True)]


def _laid(x: Tensor, lie: str) -> Tensor:
    if lie == "transposed":
        return x.t().contiguous().t()
    if lie == "expanded":
        return x[:1].expand(x.shape)
    if lie == "odd address":
        return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)
    return torch.nn.functional.pad(x, (0, 1))[:, :-1]


def _report(run: Run, what: str, call: Callable[[], list[float]], limit: float) -> None:
    errors = run.case(what, call)
    if errors is not None:
        right = all(off < limit for off in errors)
        if not right:
            run.state["wrong"].append(what)
        run.note(what, errors=_rounded(errors), right=right)


def _rounded(errors: list[float]) -> list[float]:
    return [float(f"{off:.1e}") for off in errors]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


SECTIONS: dict[str, Callable[[Run], None]] = {
    **{f"smoke {b}": lambda run, b=b: check_blocks(run, b) for b in (128, 64, 32, 16)},
    "smoke updates": check_updates,
    "smoke compiled": check_compiled,
}
