"""The kernels over blocks at the main size: all candidates, and neighbours of the best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import linear

from dynsparse.ops.linear.cuda import launch
from dynsparse.ops.linear.cuda.candidates import GRADIENT_CANDIDATES, ROWS_CANDIDATES
from dynsparse.ops.linear.cuda.chip import chip_of
from dynsparse.ops.linear.cuda.configurations import BLOCKS, Gradient, Rows, gradient_for, rows_for
from dynsparse.ops.linear.cuda.costs import PASSES, Pass, bounds, seconds
from dynsparse.ops.linear.cuda.rates import rates_of
from gpu_parts.ceilings import rates
from gpu_parts.data import Data, error
from gpu_parts.growth import scores_of
from gpu_parts.predictions import EXPECTED, WANTED, WANTED_SHARE
from gpu_parts.run import Call, Run

# Largest blocks first: they matter most.
ORDER = (128, 64, 32, 16)
# What a candidate is: its configuration, and how many tiles of samples meet all blocks before the
# next (forward, grad_input), or among how many programs the samples are divided (grad_weight).
# None: as is chosen.
Candidate = tuple[Any, ...]


def candidates(run: Run, b: int, what: str) -> list[Candidate]:
    """What to time, that of the tables first."""
    n, batch, _ = run.sizes
    chip = chip_of(run.device)
    if what == "grad_weight":
        found: list[Candidate] = [(gradient_for(b, torch.bfloat16, chip), None)]
        found += GRADIENT_CANDIDATES[b]
    else:
        found = [(rows_for(b, torch.bfloat16, batch, n // b, chip), None)]
        engine = chip.capability >= (9, 0)
        found += [(c, None) for c in ROWS_CANDIDATES[b] if engine or c.way == "pointers"]
    found = list(dict.fromkeys(found))
    ways = {getattr(c[0], "way", ""): c for c in reversed(found)}
    return list(ways.values()) if run.dry else found


def call_of(d: Data, what: str, candidate: Candidate) -> Call:
    """A launch with one candidate; operands of the main layer."""
    config, second = candidate
    if what == "grad_weight":
        return lambda: launch.grad_weight(
            d.dy, d.x, d.p, d.values.dtype, config=config, split=second
        )
    if what == "forward":
        call = lambda: launch.forward(d.x, d.values, d.p, d.bias, config)  # noqa: E731
    else:
        call = lambda: launch.grad_input(d.dy, d.values, d.p, config)  # noqa: E731
    return call if second is None else lambda: _grouped(call, second)


def _grouped(call: Call, group: int) -> object:
    before = launch.group_of
    launch.group_of = lambda *sizes: group  # type: ignore[assignment]
    try:
        return call()
    finally:
        launch.group_of = before


def dense_call(d: Data, what: str) -> Callable[[], torch.Tensor]:
    """The dense product that a pass replaces."""
    weight = d.weight
    assert weight is not None
    return {
        "forward": lambda: linear(d.x, weight, d.bias),
        "grad_input": lambda: d.dy @ weight,
        "grad_weight": lambda: d.dy.t() @ d.x,
    }[what]


def jobs(run: Run) -> Iterator[Call]:
    """Every kernel once, to be compiled by several processes before anything is timed."""
    n, batch, density = run.sizes
    for b in ORDER:
        for what in PASSES:
            for candidate in candidates(run, b, what):
                yield lambda b=b, w=what, c=candidate: call_of(
                    Data(run.device, n, batch, density, b), w, c
                )()
        yield lambda b=b: scores_of(Data(run.device, n, batch, density, b))


def measure(run: Run, b: int) -> None:
    """All candidates for blocks of `b`."""
    n, batch, density = run.sizes
    d = Data(run.device, n, batch, density, b, weight=True)
    for what in PASSES:
        calls: dict[str, Call] = {"dense": dense_call(d, what)}
        names = {}
        for candidate in candidates(run, b, what):
            name = _name(candidate)
            if _right(run, d, what, candidate):
                calls[name], names[name] = call_of(d, what, candidate), candidate
        times = run.times(calls, 0.15 * len(calls))
        for name in sorted(names.keys() & times.keys(), key=times.__getitem__):
            _note(run, d, what, names[name], times[name], times["dense"])

    _with_bias(run, d)


def _with_bias(run: Run, d: Data) -> None:
    """The gradient of the bias, which the kernel makes beside that of the values."""

    def beside() -> object:
        return launch.grad_weight(d.dy, d.x, d.p, d.values.dtype, sums=[])

    def apart() -> object:
        return launch.grad_weight(d.dy, d.x, d.p, d.values.dtype), d.dy.sum(0)

    times = run.times({"beside": beside, "apart": apart})
    if len(times) == 2:
        run.note("blocks", f"{d.b} grad_weight and the gradient of the bias, against a sum apart",
                 times["beside"], dense=times["apart"])  # fmt: skip


def _right(run: Run, d: Data, what: Pass, candidate: Candidate) -> bool:
    """Whether a candidate runs, and comes to what the dense product does."""
    name = f"{d.b} {what} {_name(candidate)}"
    if not run.tries(name):
        return False
    try:
        wanted = dense_call(d, what)()
        off = error(
            call_of(d, what, candidate)(), d.collected(wanted) if what == "grad_weight" else wanted
        )
    except Exception as problem:
        run.problem(f"blocks {name}", problem)
        run.wait()  # raises where the device is lost
        return False
    if off > 1e-2:
        run.note("blocks", name, right="NO", error=off)
        run.state["wrong"] = run.state.get("wrong", 0) + 1
    return off <= 1e-2


def float32(run: Run) -> None:
    """Blocks of 64, 128 and 32 in float32: three products of tf32 against cuBLAS without it."""
    n, batch, density = run.sizes
    for b in (64, 128, 32):
        d = Data(run.device, n, batch, density, b, torch.float32, weight=True)
        for what in PASSES:
            calls = {"dense": dense_call(d, what)}
            config = (None, None)
            calls["blocks"] = call_of(d, what, config)
            times = run.times(calls, 0.2)
            if len(times) == 2:
                at = (d.layer, batch, what, "tf32x3")
                run.note("float32", f"{b} {what}", times["blocks"], dense=times["dense"],
                         bound=bounds(*at, rates(run)).least * 1e6,
                         expected=round(seconds("blocks", *at, rates(run)) * 1e6),
                         wanted=WANTED[f"float32 blocks {b}"])  # fmt: skip


def _name(candidate: Candidate) -> str:
    return " ".join(str(part) for part in candidate if part is not None)


def _note(run: Run, d: Data, what: Pass, candidate: Candidate, us: float, dense: float) -> None:
    """Tells a time, and keeps the candidate if it is the best."""
    at = (d.layer, d.batch, what, "16-bit")
    expected = seconds("blocks", *at, rates_of(chip_of(run.device))) * 1e6
    if what != "grad_weight":  # 128: tiles of 256 samples were expected, of 128 are counted here
        expected = EXPECTED.get(f"blocks {d.b}", expected)
    bound = bounds(*at, rates(run))
    run.note("blocks", f"{d.b} {what} {_name(candidate)}", us, dense=dense,
             bound=bound.least * 1e6, expected=round(expected), bound_by=bound.name,
             **_wanted_share(run, d.b, what))  # fmt: skip
    key, best = f"{d.b} {what}", run.state["best"]
    if key not in best or us < best[key]["us"]:
        config = [c if c is None or isinstance(c, int) else list(c) for c in candidate]
        best[key] = {
            "us": us, "ratio": dense / us, "share": bound.least * 1e6 / us, "config": config,
        }  # fmt: skip


def _wanted_share(run: Run, b: int, what: Pass) -> dict[str, object]:
    told = what == "forward" and b in WANTED_SHARE and not run.dry
    return {"wanted_share": WANTED_SHARE[b]} if told else {}


def _restored(what: str, kept: dict[str, Any]) -> Candidate:
    """The candidate of an entry of `best`, which a file has held."""
    first, *rest = kept["config"]
    return ((Gradient if what == "grad_weight" else Rows)(*first), *rest)


def _near(candidate: Candidate, b: int) -> Iterator[Candidate]:
    c, rest = candidate[0], candidate[1:]
    for stages in (c.stages - 1, c.stages + 1, c.stages + 2):
        if stages > 1:
            yield (c._replace(stages=stages), *rest)
    for warps in (4, 8):
        yield (c._replace(warps=warps), *rest)
    for samples in (c.samples // 2, c.samples * 2):
        if 32 <= samples <= 256:
            yield (c._replace(samples=samples), *rest)
    if isinstance(c, Gradient):
        for blocks in (c.blocks // 2, c.blocks * 2):
            if blocks:
                yield (c._replace(blocks=blocks), *rest)
        for split in (1, 2, 3, 4):
            yield (c, split)
    else:
        for group in (2, 4, 16, 32):
            yield (c, group)
        for inputs in (c.inputs // 2, c.inputs * 2):
            # The copy engine fetches parts of one block; pointers join several.
            if 32 <= inputs <= (128 if c.way == "pointers" else b):
                yield (c._replace(inputs=inputs), *rest)


def refine(run: Run) -> None:
    """Neighbours of the best, one change at a time, until the time is spent."""
    n, batch, density = run.sizes
    tried: set[str] = set()
    while run.left() > 15:
        before = len(tried)
        for key, kept in list(run.state["best"].items()):
            b, what = int(key.split()[0]), key.split()[1]
            d = Data(run.device, n, batch, density, b, weight=True)
            for candidate in _near(_restored(what, kept), b):
                name = _name(candidate)
                if f"{key} {name}" in tried or run.left() < 15:
                    continue
                tried.add(f"{key} {name}")
                if not _right(run, d, what, candidate):
                    continue
                calls = {"dense": dense_call(d, what), "this": call_of(d, what, candidate)}
                times = run.times(calls, 0.1)
                if "this" in times and times["this"] < run.state["best"][key]["us"]:
                    _note(run, d, what, candidate, times["this"], times["dense"])
                if run.dry:
                    return
            del d
        if len(tried) == before:
            return


assert set(ORDER) == set(BLOCKS)
