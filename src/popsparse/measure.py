"""Runs of products that measure cycles, memory and errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dynsparse.pattern import SparsePattern
from popsparse.layer import Layer
from popsparse.machine import Engine, Graph, Profile, Tensor
from popsparse.machine import Sequence as Program
from popsparse.planning import dense
from popsparse.planning.params import MatmulParams
from popsparse.planning.plan import PASSES, Plan
from popsparse.planning.static import make_plan
from popsparse.planning.static_layout import StaticPlan
from popsparse.plans import tile_memory
from popsparse.programs.dense import Layout, add_product, create_operand
from popsparse.programs.static import add_product as add_static_product
from popsparse.programs.static import add_values, dense_operand

AnyPlan = Plan | StaticPlan | dense.DensePlan


class Run(NamedTuple):
    """One pass on the machine; `error` is its `relative_error`, None without numbers."""

    profile: Profile
    error: float | None


def relative_error(values: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference over the largest expected element; infinite for NaN."""
    if not expected.size:
        return 0.0
    off = float(np.abs(values - expected).max()) / (float(np.abs(expected).max()) or 1.0)
    return off if np.isfinite(off) else float("inf")


def plan_figures(plan: AnyPlan) -> dict[str, Any]:
    """The parts of out (x), in (y) and batch (z) of a plan, and its method.

    For a static plan, x is the number of tiles that share a band's rows (of the band with the most
    tiles in use), y the number of column bands.
    """
    if isinstance(plan, StaticPlan):
        bands = [plan.pieces(part).band for part in range(plan.n_split)]
        x = max(int(np.bincount(band, minlength=1).max()) for band in bands)
        cut = {"x": x, "y": plan.num_bands, "z": plan.n_split, "method": "static"}
        return cut | {"tiles": plan.tiles_used}
    if isinstance(plan, dense.DensePlan):
        x, z = (plan.out, plan.field) if plan.swapped else (plan.field, plan.out)
        cut = {"x": x, "y": plan.in_, "z": z, "method": f"dense {plan.method}"}
        return cut | {"serial_out": plan.serial_out, "serial_in": plan.serial_in}
    parts = plan.partition
    cut = {"x": parts.x, "y": parts.y, "z": parts.z, "method": plan.method.value}
    if "grad_weight" in plan.costs:
        cut["grad_w_exchange_buckets"] = plan.grad_w_exchange_buckets
    return cut


def _draw_values(
    shape: Sequence[int], sums: float, dtype: str, generator: Any, normal: bool
) -> torch.Tensor:
    """+1 and -1 where their sums stay nearly exact, else uniform in [-1, 1); or normal."""
    exact = 2048 if dtype == "float16" else 1 << 24
    if normal:
        values = torch.randn(list(shape), generator=generator)
    elif 1.3 * sums <= 10 * exact:
        values = torch.randint(2, list(shape), generator=generator).float() * 2 - 1
    else:
        values = torch.rand(list(shape), generator=generator) * 2 - 1
    return values.to(getattr(torch, dtype))


def sparse_figures(
    layer: Layer,
    pattern: SparsePattern,
    passes: Sequence[str],
    *,
    seed: int = 0,
    ignore_data: bool = False,
    normal: bool = False,
) -> dict[str, Any]:
    """Run passes of a layer on a pattern, with random values and operands.

    Args:
        layer: a layer built for these passes.
        pattern: a pattern with the layer's shape and block size.
        seed: seed of the values.
        ignore_data: run without numbers; the layer may have `numerics=False`.
        normal: draw from a normal distribution, not numbers whose sums round little.

    Returns:
        "cycles" and "tflops" by pass (2 x non-zeros x batch over the pass's seconds at the target's
        clock), "max_tile_bytes", "propagation_steps", "spilled" (blocks that left the bucket they
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
        error = _run_and_check(layer, pattern, passes, seed, normal)
    assert layer.encoding is not None
    products = 2.0 * pattern.nnz * pattern.block_size**2 * sizes.z
    profiles = {name: layer.profiles[name] for name in passes}
    return {
        **_figures_of(profiles, dict.fromkeys(passes, products)),
        "propagation_steps": layer.encoding.info.propagation_steps,
        "spilled": layer.encoding.info.spilled,
        "max_relative_error": error,
    }


def _figures_of(profiles: Mapping[str, Profile], products: Mapping[str, float]) -> dict[str, Any]:
    return {
        "cycles": {name: profile.cycles for name, profile in profiles.items()},
        "tflops": {
            name: products[name] / profile.seconds / 1e12 for name, profile in profiles.items()
        },
        "max_tile_bytes": max(profile.memory.max_tile_bytes for profile in profiles.values()),
    }


def _run_and_check(
    layer: Layer, pattern: SparsePattern, passes: Sequence[str], seed: int, normal: bool
) -> float:
    plan, generator = layer.plan, torch.Generator().manual_seed(seed)
    rows, cols = pattern.shape
    batch, dtype = plan.sizes.z, plan.dtype.name
    sums = max(rows, cols, batch) * max(pattern.density, 1e-9)
    shapes = (pattern.values_shape, (batch, cols), (batch, rows))
    values, x, dy = (_draw_values(shape, sums, dtype, generator, normal) for shape in shapes)
    layer.set_values(values)
    weights = pattern.to_dense(values).double()
    error = 0.0
    for name in passes:
        if name == "forward":
            result, expected = layer.forward(x), x.double() @ weights.T
        elif name == "grad_input":
            result, expected = layer.grad_input(dy), dy.double() @ weights
        else:
            result = layer.grad_weight(dy, x)
            expected = pattern.values_of(dy.double().T @ x.double())
        error = max(error, relative_error(result.astype(np.float64), expected.numpy()))
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

    float16 uses float16 partials by default, as published dense figures do.

    Raises:
        ValueError: sizes or operands that do not fit the machine.
    """
    shapes = {
        "forward": (rows, cols, batch),
        "grad_input": (cols, rows, batch),
        "grad_weight": (rows, batch, cols),
    }
    options = {"partials": partials, "available_memory_proportion": available_memory_proportion}
    return {name: dense.plan(*shapes[name], dtype, target, **options) for name in passes}


def static_plans(
    pattern: SparsePattern,
    batch: int,
    dtype: Any,
    target: Any,
    passes: Iterable[str] = ("forward",),
    options: Any = None,
) -> dict[str, StaticPlan]:
    """A plan for each pass of a layer with a fixed pattern [out, in].

    forward is sparse [out, in] x dense [in, batch]; grad_input is dense [batch, out] x the sparse
    matrix. Each is planned separately and has its own copy of the values.

    Raises:
        ValueError: grad_weight, which has no static product; as `make_plan`.
    """
    out, in_ = pattern.shape
    plans = {}
    for name in passes:
        if name == "forward":
            params = MatmulParams.create_for_sparse_dense(1, out, in_, batch)
        elif name == "grad_input":
            params = MatmulParams.create_for_dense_sparse(1, batch, out, in_)
        else:
            raise ValueError(
                f"static products support forward and grad_input, got {name!r}: use the dynamic "
                "method"
            )
        plans[name] = make_plan(target, dtype, params, pattern, options)
    return plans


def _run_plan(
    plan: StaticPlan | dense.DensePlan, seed: int, *, numerics: bool, normal: bool
) -> Run:
    """One product with operands uniform in [-1, 1), or normal."""
    graph, program = Graph(plan.target), Program()
    right: Tensor
    result: Tensor
    if isinstance(plan, StaticPlan):
        left, right = add_values(graph, plan, "values"), dense_operand(graph, plan, "operand")
        result = add_static_product(graph, plan, left, right, program, "product")
    else:
        layout = Layout(plan)
        left, right = (create_operand(graph, layout, which, which) for which in "ab")
        result = add_product(graph, layout, left, right, program, "product")
    engine = Engine(graph, program, numerics=numerics)
    if not numerics:
        return Run(engine.run(), None)
    rng, kind = np.random.default_rng(seed), np.dtype(plan.dtype.name)

    def draw(*shape: int) -> np.ndarray:
        drawn = rng.standard_normal(shape) if normal else rng.uniform(-1, 1, shape)
        return drawn.astype(kind)

    if isinstance(plan, StaticPlan):
        values = draw(*plan.pattern.values_shape)
        engine.write(left, values[plan.order].reshape(-1))
        a, b = plan.pattern.to_dense(torch.from_numpy(values)).numpy(), draw(*right.shape[1:])
    else:
        a, b = draw(plan.m, plan.k), draw(plan.k, plan.n)
        engine.write(left, a[None])
    engine.write(right, b[None])
    profile = engine.run()
    expected = a.astype(np.float64) @ b.astype(np.float64)
    return Run(profile, relative_error(engine.read(result)[0], expected))


def run_plans(
    plans: Mapping[str, StaticPlan] | Mapping[str, dense.DensePlan],
    *,
    seed: int = 0,
    ignore_data: bool = False,
    normal: bool = False,
) -> dict[str, Run]:
    """Run static or dense products on the simulated machine, with random values and operands.

    Args:
        plans: the result of `static_plans` or `dense_plans`, by pass.
        seed: seed of the values, uniform in [-1, 1).
        ignore_data: run without numbers.
        normal: draw from a normal distribution.

    Raises:
        ValueError: a plan that does not fit the tiles, code included.
    """
    numerics, runs = not ignore_data, {}
    for name, plan in plans.items():
        if isinstance(plan, StaticPlan):
            memory = tile_memory(plan)
            if not memory.fits:
                raise ValueError(
                    f"the best plan needs {memory.needed} bytes a tile ({memory.temporary} of "
                    f"them temporary), the target has {memory.available}: use a smaller batch, a "
                    "lower available_memory_proportion or more tiles"
                )
        runs[name] = _run_plan(plan, seed, numerics=numerics, normal=normal)
    return runs


def run_figures(
    plans: Mapping[str, StaticPlan] | Mapping[str, dense.DensePlan], runs: Mapping[str, Run]
) -> dict[str, Any]:
    """The figures of the runs of `run_plans`, with the keys of `sparse_figures`.

    Returns:
        "cycles", "tflops" by pass (`plan.products` over the pass's seconds at the target's clock),
        "max_tile_bytes", "propagation_steps" and "spilled" (always 0), "max_relative_error".
    """
    errors = [run.error for run in runs.values() if run.error is not None]
    profiles = {name: run.profile for name, run in runs.items()}
    return {
        **_figures_of(profiles, {name: plan.products for name, plan in plans.items()}),
        "propagation_steps": 0,
        "spilled": 0,
        "max_relative_error": max(errors, default=None),
    }
