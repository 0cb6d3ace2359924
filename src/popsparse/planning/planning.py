"""The short way to a plan: sizes and a density instead of parameter objects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from dynsparse.files.shorten import shortened
from dynsparse.typed import typed
from popsparse.planning.cache import PlanningCache
from popsparse.planning.options import Options
from popsparse.planning.params import FullyConnectedParams, SparsityParams
from popsparse.planning.plan import PASSES, Plan
from popsparse.planning.search import make_plan


def parse_passes(passes: str | Iterable[str]) -> tuple[str, ...]:
    """Pass names in the order they run; forward is always among them.

    Raises:
        ValueError: an unknown name.
    """
    if not isinstance(passes, Iterable):
        raise TypeError(f"passes must be names such as {PASSES}, got {shortened(passes)}")
    names = passes.split(",") if isinstance(passes, str) else list(passes)
    names = [str(name).strip() for name in names]
    for name in names:
        if name not in PASSES:
            raise ValueError(f"passes must be among {', '.join(PASSES)}, got {name!r}")
    return tuple(name for name in PASSES if name in names or name == "forward")


@typed
def plan(
    out: int,
    in_: int,
    batch: int,
    density: float,
    block_size: Any = 1,
    dtype: Any = "float16",
    target: Any = None,
    *,
    passes: str | Iterable[str] = ("forward",),
    options: Any = None,
    cache: PlanningCache | None = None,
) -> Plan:
    """Plan a sparse layer with weights [out, in_] for inputs [batch, in_].

    Args:
        out, in_, batch: sizes.
        density: present blocks over all blocks, in [0, 1].
        block_size: edge of the blocks, or (rows, columns).
        dtype: float16 or float32.
        target: a `popsparse.machine.Target`; by default the Mk2.
        passes: those that will run; one partition serves them all. A comma-separated string or
            names. Forward is always planned for.
        options: `Options` or a mapping of further options.
        cache: plans made earlier are taken from it.

    Raises:
        ValueError, TypeError: a size, density, pass or option that makes no sense, or nothing that
            the constraints allow.

    >>> from popsparse.machine.target import Target
    >>> plan(512, 512, 64, 0.1, target=Target(tiles=24)).partition
    Sizes(groups=1, x=24, y=1, z=1)
    """
    if target is None:
        from popsparse.machine import Target

        target = Target.mk2()
    names = parse_passes(passes)
    wanted = replace(
        Options.parse(options),
        do_grad_a_pass="grad_input" in names,
        do_grad_w_pass="grad_weight" in names,
    )
    sparsity = SparsityParams(block_size)
    params = FullyConnectedParams(sparsity, density, batch, 1, in_, out)
    return make_plan(target, dtype, params, wanted, cache)
