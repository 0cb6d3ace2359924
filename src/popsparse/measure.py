"""Running products on the simulated machine and saying what they took, as plain figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dynsparse.pattern import SparsePattern
from popsparse.dense.layout import Layout, Operand, create_operand
from popsparse.dense.program import add_product
from popsparse.layer import Layer
from popsparse.machine import Engine, Graph
from popsparse.machine import Sequence as Program
from popsparse.planning import dense_planner as dense
from popsparse.planning.data_types import data_type
from popsparse.planning.plan import PASSES, Plan
from popsparse.timing.run import Run, relative_error, run_figures


def plan_figures(plan: Plan) -> dict[str, Any]:
    """The partition and the method of a plan."""
    parts = plan.partition
    figures = {"x": parts.x, "y": parts.y, "z": parts.z, "method": plan.method.value}
    if "grad_weight" in plan.costs:
        figures["grad_w_exchange_buckets"] = plan.grad_w_exchange_buckets
    return figures


def draw_pattern(
    shape: tuple[int, int],
    density: float,
    block_size: int,
    seed: int,
    area: tuple[tuple[int, int], tuple[int, int], float] | None = None,
) -> SparsePattern:
    """A random pattern.

    Args:
        shape: rows and columns, elements.
        density: of the whole.
        seed: of the draw.
        area: ((row, column), (row, column), weight): from the first corner up to the second, whole
            blocks are `weight` times as likely as elsewhere; then each block is drawn on its own,
            and the density is met in the mean. Without it the number of blocks is exact.

    Raises:
        ValueError: an area outside the matrix, or so heavy that a block would be drawn with more
            than certainty.
    """
    generator = torch.Generator().manual_seed(seed)
    if area is None:
        return SparsePattern.random(shape, density, block_size=block_size, generator=generator)
    (top, left), (bottom, right), weight = area
    if not (0 <= top < bottom <= shape[0] and 0 <= left < right <= shape[1]):
        raise ValueError(
            f"the weighted area must lie in {shape[0]} x {shape[1]} and not be empty, got "
            f"({top}, {left}) to ({bottom}, {right})"
        )
    grid = torch.ones(shape[0] // block_size, shape[1] // block_size)
    grid[top // block_size : bottom // block_size, left // block_size : right // block_size] = (
        weight
    )
    chance = grid * (density * grid.numel() / grid.sum())
    if float(chance.max()) > 1:
        raise ValueError(
            f"a weighting of {weight:g} needs a probability of {float(chance.max()):.2f} in the "
            "weighted area: lower the weighting or the density"
        )
    drawn = torch.rand(grid.shape, generator=generator) < chance
    return SparsePattern.from_flat(
        drawn.flatten().nonzero().flatten(), shape=shape, block_size=block_size
    )


def _numbers(shape: Sequence[int], sums: float, dtype: str, generator: Any) -> torch.Tensor:
    """+1 and -1 where sums of so many stay nearly exact, else uniform in [-1, 1)."""
    exact = 2048 if dtype == "float16" else 1 << 24
    if 1.3 * sums <= 10 * exact:
        found = torch.randint(2, list(shape), generator=generator).float() * 2 - 1
    else:
        found = torch.rand(list(shape), generator=generator) * 2 - 1
    return found.to(getattr(torch, dtype))


def sparse_figures(
    layer: Layer,
    pattern: SparsePattern,
    passes: Sequence[str],
    *,
    seed: int = 0,
    ignore_data: bool = False,
) -> dict[str, Any]:
    """Run passes of a layer on a pattern, with random values and operands.

    Args:
        layer: built for these passes.
        pattern: of the layer's shape and block size.
        seed: of the values.
        ignore_data: run without numbers; the layer may be one with `numerics=False`.

    Returns:
        "cycles" and "tflops" by pass (2 x non-zeros x batch over the pass's seconds at the target's
        clock), "max_tile_bytes", "propagation_steps", "spilled" (blocks not in the bucket they
        began in), "max_relative_error" (largest difference from the float64 product over its
        largest element; None without numbers).

    Raises:
        BucketOverflowError: more non-zeros than the buckets hold (a ValueError).
    """
    plan = layer.plan
    sizes = plan.sizes
    layer.set_pattern(pattern)
    error: float | None = None
    if ignore_data:
        for name in passes:
            layer.run(name)
    else:
        error = _run_and_check(layer, pattern, passes, seed)
    assert layer.encoding is not None
    products = 2.0 * pattern.nnz * pattern.block_size**2 * sizes.z
    profiles = [layer.profiles[name] for name in passes]
    seconds = {name: layer.profiles[name].seconds for name in passes}
    return {
        "cycles": {name: layer.profiles[name].cycles for name in passes},
        "tflops": {name: products / seconds[name] / 1e12 for name in passes},
        "max_tile_bytes": max(profile.memory.max_tile_bytes for profile in profiles),
        "propagation_steps": layer.encoding.info.propagation_steps,
        "spilled": layer.encoding.info.spilled,
        "max_relative_error": error,
    }


def _run_and_check(layer: Layer, pattern: SparsePattern, passes: Sequence[str], seed: int) -> float:
    plan, generator = layer.plan, torch.Generator().manual_seed(seed)
    rows, cols = pattern.shape
    batch, dtype = plan.sizes.z, plan.dtype.name
    sums = max(rows, cols, batch) * max(pattern.density, 1e-9)
    values = _numbers(pattern.values_shape, sums, dtype, generator)
    x = _numbers((batch, cols), sums, dtype, generator)
    dy = _numbers((batch, rows), sums, dtype, generator)
    layer.set_values(values)
    weights = pattern.to_dense(values).double()
    error = 0.0
    for name in passes:
        if name == "forward":
            found, wanted = layer.forward(x), x.double() @ weights.T
        elif name == "grad_input":
            found, wanted = layer.grad_input(dy), dy.double() @ weights
        else:
            found = layer.grad_weight(dy, x)
            wanted = pattern.values_of(dy.double().T @ x.double())
        if wanted.numel():
            scale = float(wanted.abs().max()) or 1.0
            off = float((torch.from_numpy(found).double() - wanted).abs().max()) / scale
            error = max(error, off if np.isfinite(off) else float("inf"))
    return error


def dense_plans(
    rows: int,
    cols: int,
    batch: int,
    dtype: Any,
    target: Any,
    passes: Sequence[str] = PASSES[:1],
    *,
    partials: Any = None,
    available_memory_proportion: float = 0.6,
) -> dict[str, dense.DensePlan]:
    """The plan of the dense product of each pass.

    float16 uses float16 partials unless told otherwise, as published dense figures do.

    Raises:
        ValueError: sizes or operands the machine cannot hold.
    """
    shapes = {
        "forward": (rows, cols, batch),
        "grad_input": (cols, rows, batch),
        "grad_weight": (rows, batch, cols),
    }
    return {
        name: dense.plan(
            *shapes[name],
            data_type(dtype),
            target,
            partials=partials,
            available_memory_proportion=available_memory_proportion,
        )
        for name in passes
    }


def dense_plan_figures(plan: dense.DensePlan) -> dict[str, Any]:
    """The cut in the words of the dynamic plan: parts of out, in and batch."""
    x, z = (plan.out, plan.field) if plan.swapped else (plan.field, plan.out)
    return {
        "x": x,
        "y": plan.in_,
        "z": z,
        "method": f"dense {plan.method}",
        "serial_out": plan.serial_out,
        "serial_in": plan.serial_in,
    }


def run_dense(
    plans: dict[str, dense.DensePlan], *, seed: int = 0, ignore_data: bool = False
) -> dict[str, Run]:
    """Run the dense product of each pass on the simulated machine, with random operands.

    Args:
        plans: as `dense_plans` makes them.
        seed: of the operands, uniform in [-1, 1).
        ignore_data: compute no numbers.

    Raises:
        OutOfMemoryError: a plan that does not fit the tiles (a ValueError).
    """
    return {name: _run_dense(plan, seed, numerics=not ignore_data) for name, plan in plans.items()}


def dense_figures(plans: dict[str, dense.DensePlan], runs: dict[str, Run]) -> dict[str, Any]:
    """The figures of what `run_dense` ran, as of `run_figures`, and "plan", that of the first."""
    products = {name: 2.0 * plan.m * plan.k * plan.n for name, plan in plans.items()}
    first = next(iter(plans.values()))
    return {"plan": dense_plan_figures(first), **run_figures(runs, products)}


def _run_dense(plan: dense.DensePlan, seed: int, *, numerics: bool) -> Run:
    graph, program, layout = Graph(plan.target), Program(), Layout(plan)
    operands = [create_operand(graph, layout, which, which) for which in "ab"]
    result = add_product(graph, layout, operands[0], operands[1], program, "product")
    engine = Engine(graph, program, numerics=numerics)
    if not numerics:
        return Run(engine.run(), None)
    rng, kind = np.random.default_rng(seed), np.dtype(plan.dtype.name)
    a, b = (rng.uniform(-1, 1, size).astype(kind) for size in ((plan.m, plan.k), (plan.k, plan.n)))
    for operand, values in zip(operands, (a, b), strict=True):
        if isinstance(operand, Operand):
            engine.write(operand.home, operand.arrange(values[None]))
        else:
            engine.write(operand, values[None])
    profile = engine.run()
    found = result.join(engine.read(result.home))[0]
    return Run(profile, relative_error(found, a.astype(np.float64) @ b.astype(np.float64)))
