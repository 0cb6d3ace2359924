"""The vertices of a dense product, with the cycles that `dense.cycles` counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from popsparse.dense.layout import Layout
from popsparse.machine import INT, Codelet, In, InOut, Out, VertexView
from popsparse.machine.facts import KERNEL_CODE, SUM_CODE, Fact
from popsparse.planning import dense_cycles as cycles
from popsparse.planning.data_types import DataType


def _supervisor(
    name: str,
    fields: dict[str, Any],
    compute: Callable[[VertexView], None],
    spent: Any,
    flops: Any = 0,
    code: Fact | None = None,
) -> Codelet:
    size = 0 if code is None else int(code.typical)
    return Codelet(name, fields, compute, spent, "supervisor", flops=flops, code_bytes=size)


def multiply(layout: Layout, *, turned: tuple[bool, bool]) -> Codelet:
    """A part of "a" times a part of "b"; `turned`: which of them are stored transposed."""
    plan = layout.plan
    target = plan.target
    sizes = (layout.field, layout.in_groups, layout.out_groups)
    if isinstance(plan.vertex, cycles.AMP):
        load = target.coefficient_load_bytes_per_cycle
        spent = cycles.amp(*sizes, plan.vertex, plan.dtype, plan.partials, target.workers, load)
    else:
        spent = cycles.hmac(*sizes, plan.vertex, plan.dtype, plan.partials, target.workers)

    def compute(v: VertexView) -> None:
        a, b = (
            part.astype(np.float32).swapaxes(-1, -2) if turn else part.astype(np.float32)
            for part, turn in zip((v.a, v.b), turned, strict=True)
        )
        v.partials[...] = np.matmul(a, b)

    def flops(v: VertexView) -> int:
        inner = v.a.shape[-2 if turned[0] else -1]
        return 2 * inner * v.partials.shape[-1] * v.partials.shape[-2]

    fields = {"a": In(), "b": In(), "partials": Out()}
    return _supervisor("dense product", fields, compute, float(spent), flops, KERNEL_CODE)


def reduce(layout: Layout, result: DataType) -> Codelet:
    """Sums over the axis before the last: a tile's own partials (none or one) and those of
    others."""
    plan = layout.plan
    more = (plan.partials, result, plan.target.workers, plan.target.bytes_per_tile)

    def compute(v: VertexView) -> None:
        total = v.others.sum(axis=-2, dtype=np.float32)
        v.out[...] = total + v.own.sum(axis=-2, dtype=np.float32)

    def spent(v: VertexView) -> Any:
        return cycles.reduce_stage(v.out.shape[-1], v.own.shape[-2] + v.others.shape[-2], *more)

    def flops(v: VertexView) -> int:
        return v.out.shape[-1] * (v.own.shape[-2] + v.others.shape[-2] - 1)

    fields = {"own": In(), "others": In(), "out": Out()}
    return _supervisor("dense reduce", fields, compute, spent, flops, SUM_CODE)


def take_slice(layout: Layout) -> Codelet:
    """The share of the step `index` of all steps: [.., steps, share] to [.., share]."""

    def compute(v: VertexView) -> None:
        index = v.index[..., None, None]
        v.out[...] = np.take_along_axis(v.src, index.astype(np.int64), axis=-2)[..., 0, :]

    def spent(v: VertexView) -> Any:
        return cycles.dynamic_slice(v.out.shape[-1], layout.plan.dtype, layout.plan.target.workers)

    fields = {"src": In(), "index": In(INT), "out": Out()}
    return _supervisor("dynamic slice", fields, compute, spent)


def write_slice(layout: Layout) -> Codelet:
    """The inverse of `take_slice`."""

    def compute(v: VertexView) -> None:
        index = v.index[..., None, None].astype(np.int64)
        np.put_along_axis(v.out, index, v.src[..., None, :], axis=-2)

    def spent(v: VertexView) -> Any:
        return cycles.dynamic_slice(v.src.shape[-1], layout.plan.dtype, layout.plan.target.workers)

    fields = {"src": In(), "index": In(INT), "out": InOut()}
    return _supervisor("dynamic update", fields, compute, spent)


def add(layout: Layout) -> Codelet:
    """What a step made, added to what earlier ones did."""

    def compute(v: VertexView) -> None:
        v.total[...] = v.total.astype(np.float32) + v.src

    def spent(v: VertexView) -> Any:
        return cycles.add_in_place(v.src.shape[-1], layout.plan.dtype, layout.plan.target.workers)

    fields = {"src": In(), "total": InOut()}
    return _supervisor("add in place", fields, compute, spent, lambda v: v.src.shape[-1])


def in_place(name: str, spent: Callable[[int], Any]) -> Codelet:
    """Data brought into another order on its tile; `spent` gives the cycles for so many bytes.

    The order inside a part is nothing that the simulation's numbers depend on, so they stay.
    """

    def of_vertex(v: VertexView) -> Any:
        return spent(v.data.itemsize * v.data.size // max(v.count, 1))

    return _supervisor(name, {"data": InOut()}, lambda v: None, of_vertex)
