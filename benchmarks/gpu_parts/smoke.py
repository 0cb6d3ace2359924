"""Is every kernel right? Each against float64, before anything is timed.

What people run: all three passes and the bias sums of each block size, one sample and ragged
batches, float32 values under 16-bit activations, operands at odd strides and addresses; growth
scores, a pattern update, a captured step and one that torch.compile captures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import linear

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.ops import use_kernel
from dynsparse.ops.grow import topk_outside
from dynsparse.ops.linear.cuda import blocks, dense, launch
from dynsparse.ops.linear.cuda.chip import TERMS
from gpu_parts.data import Data, error
from gpu_parts.graphs import captured_training
from gpu_parts.run import Run

HALF = torch.bfloat16
DTYPES = (torch.float32, HALF, torch.float16)


def limit_of(dtype: torch.dtype, terms: int) -> float:
    """Of the norm. 16-bit results are rounded once; tensor cores cut off sums of float32, which end
    after `TERMS`: twice what emulation says of them."""
    if dtype is torch.float32:
        return 2e-6 + 2e-8 * min(terms, TERMS)
    return {HALF: 6e-3, torch.float16: 1e-3}[dtype]


def check_blocks(run: Run, b: int) -> None:
    """The kernels over blocks of `b`, and the dense way beside them."""
    n = 4 * b if run.small else 1024
    batches = (70, 1) if run.small else (1000, 1)
    for dtype, batch in itertools.product(DTYPES, batches):
        with _case(run, f"{b} {_name(dtype)} batch {batch}"):
            d = Data(run.device, n, batch, 0.4, b, dtype, out=n - b)
            _check(run, d)
    for lie in ("transposed", "expanded", "odd address", "odd stride"):
        with _case(run, f"{b} {lie}"):
            d = Data(run.device, n, batches[0], 0.4, b, HALF)
            d.x, d.dy = _laid(d.x, lie), _laid(d.dy, lie)
            _check(run, d)
    with _case(run, f"{b} float32 values"):
        d = Data(run.device, n, batches[0], 0.4, b, HALF)
        d.values = torch.randn(d.values.shape, device=run.device)
        _check(run, d)
    if not run.small:
        for terms in (128, 1024, 8192):
            with _case(run, f"{b} float32 sums of {terms}"):
                d = Data(run.device, 512, terms, 0.4, b, torch.float32)
                got = launch.grad_weight(d.dy, d.x, d.p, torch.float32)
                wanted = d.collected(d.dy.double().t() @ d.x.double())
                _tell(run, f"{b} float32 sums of {terms}", [error(got, wanted)],
                      limit_of(d.x.dtype, terms))  # fmt: skip


def check_rest(run: Run) -> None:
    """Growth, updates, graphs, and compiled steps."""
    for b, dtype in itertools.product((1, 4, 16, 64, 128), (torch.float64, *DTYPES)):
        with _case(run, f"growth scores of blocks of {b}, {_name(dtype)}"):
            d = Data(torch.device("cpu"), 512, 256, 0.2, b, dtype)
            k = max(1, (d.pattern.total - d.pattern.nnz) // 4)
            here = topk_outside([(d.x, d.dy)], d.pattern, k)
            there = topk_outside([(d.x.to(run.device), d.dy.to(run.device))], d.pattern, k)
            off = error(there.scores.cpu(), here.scores)
            _tell(run, f"growth scores of blocks of {b}, {_name(dtype)}", [off],
                  1e-12 if dtype is torch.float64 else limit_of(dtype, 256))  # fmt: skip
    for b in (1, 64):
        with _case(run, f"an update of RigL, blocks of {b}"):
            _tell(run, f"an update of RigL, blocks of {b}", [_update(run, b)], 1e-4)
        with _case(run, f"a captured training over updates, blocks of {b}"):
            off = captured_training(run, b)
            _tell(run, f"a captured training over updates, blocks of {b}", [off], 1e-3)
        with _case(run, f"compiled with reduce-overhead, blocks of {b}"):
            off = _reduce_overhead(run, b)
            _tell(run, f"compiled with reduce-overhead, blocks of {b}", off, 1e-2)


def _check(run: Run, d: Data) -> None:
    limit = limit_of(d.x.dtype, max(d.n, d.batch))
    weight, x, dy = d.dense(d.values.double()), d.x.double(), d.dy.double()
    if d.values.dtype is not d.x.dtype:
        weight = d.dense(d.values.to(d.x.dtype).double())
    wanted = (
        linear(x, weight, d.bias.double()), dy @ weight, d.collected(dy.t() @ x), dy.sum(0)
    )  # fmt: skip
    for name, kind in (("blocks", blocks), ("dense", dense)):
        errors, before = [], None
        for _ in range(2):
            sums: list[Tensor] = []
            more = {"sums": sums} if kind is blocks else {}
            got = [
                kind.forward(d.x, d.values, d.p, d.bias),
                *kind.backward(d.dy, d.x, d.values, d.p, True, True, **more),
                *sums,
            ]
            errors = [error(*pair) for pair in zip(got, wanted, strict=False)]
            if before is not None and not all(map(torch.equal, got, before)):
                raise AssertionError("two runs give different bits")
            before = got
        _tell(run, f"{run.trying} by {name}", errors, limit)


def _update(run: Run, b: int) -> float:
    """How far one update on the device is from the same on the CPU, in float64."""
    weights = []
    for device in (torch.device("cpu"), run.device):
        torch.manual_seed(0)
        layer = SparseLinear(256, 512, 0.2, b, dtype=torch.float64).to(device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        trainer = ds.RigL(layer, optimizer, total_steps=100, update_interval=2)
        x, dy = torch.randn(64, 256).double(), torch.randn(64, 512).double()
        for _ in range(4):
            layer(x.to(device)).backward(dy.to(device))
            trainer.step()
            optimizer.zero_grad()
        weights.append(layer.to_dense().detach().cpu())
    return error(weights[1], weights[0])


def _reduce_overhead(run: Run, b: int) -> list[float]:
    """Steps of a compiled layer, fresh from its making, beside eager ones."""
    if run.device.type == "cpu":
        return [0.0]
    torch.manual_seed(0)
    layer = SparseLinear(1024, 1024, 0.1, b, device=run.device, dtype=HALF)
    x = torch.randn(512, 1024, device=run.device).to(HALF).requires_grad_()
    compiled = torch.compile(layer, mode="reduce-overhead")
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


@contextmanager
def _case(run: Run, name: str) -> Iterator[None]:
    run.trying = name
    try:
        yield
    except Exception as problem:
        run.wrong(name, problem)
        run.wait()  # raises where the device is lost to this process


def _tell(run: Run, what: str, errors: list[float], limit: float) -> None:
    right = all(off < limit for off in errors)
    run.note(what, errors=[float(f"{off:.1e}") for off in errors], right=right)
    if not right:
        run.state["wrong"].append(what)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


SECTIONS: dict[str, Callable[[Run], None]] = {
    **{f"smoke {b}": lambda run, b=b: check_blocks(run, b) for b in (128, 64, 32, 16)},
    "smoke rest": check_rest,
}
