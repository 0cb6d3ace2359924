"""The dense products of a layer, as plans that are constrained to `use_dense` carry them out."""

from __future__ import annotations

from typing import Any

from dynsparse.popsparse.dense.planner import DensePlan
from dynsparse.popsparse.dense.planner import plan as plan_product
from dynsparse.popsparse.product.options import Options
from dynsparse.popsparse.product.params import FullyConnectedParams

__all__ = ["dense_pass", "dense_passes"]


def dense_pass(
    name: str, target: Any, dtype: Any, params: FullyConnectedParams, **options: Any
) -> DensePlan:
    """The dense product of a pass for one group, on its share of the tiles.

    Options and errors as of `dense.plan`.
    """
    x, y = params.output_channels_per_group, params.input_channels_per_group
    z = params.batch_size
    shapes = {"forward": (x, y, z), "grad_input": (y, x, z), "grad_weight": (y, z, x)}
    share = target.with_(tiles=max(1, target.tiles // params.num_groups))
    return plan_product(*shapes[name], dtype, share, **options)


def dense_passes(
    target: Any, dtype: Any, params: FullyConnectedParams, options: Options
) -> dict[str, DensePlan]:
    """The dense products by pass name; errors as of `dense.plan`."""
    names = ["forward"]
    if options.do_grad_a_pass or options.do_grad_w_pass:
        # The gradient that grad_weight reads lies as grad_input wants it.
        names.append("grad_input")
    if options.do_grad_w_pass:
        names.append("grad_weight")
    return {
        name: dense_pass(
            name,
            target,
            dtype,
            params,
            partials=options.partials_type,
            available_memory_proportion=options.available_memory_proportion,
        )
        for name in names
    }
