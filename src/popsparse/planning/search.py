"""The planner: prices every partition and takes the cheapest.

The search is exhaustive: every (x, y, z) whose product fits the tiles, for every method, evaluated
as arrays. The plan with the fewest estimated cycles wins; ties go to the least temporary memory,
then to the earlier method and the smaller partition.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dynsparse._core.checks import check_types, shorten
from popsparse.machine.dtypes import DType
from popsparse.machine.target import Target
from popsparse.planning.cost import (
    Buckets,
    SearchSpace,
    TermArray,
    bucket_arrays,
    grad_weight_terms,
    product_terms,
    value_elements,
)
from popsparse.planning.dense import dense_passes
from popsparse.planning.options import Options
from popsparse.planning.params import (
    FullyConnectedParams,
    MatmulParams,
    SparsityParams,
    data_type,
    even_parts,
    overflow_words,
)
from popsparse.planning.plan import (
    PASSES,
    RUNNERS_UP,
    BucketSizes,
    Method,
    PassCost,
    Plan,
    PlanningCache,
    Search,
    Sizes,
    Term,
)

_log = logging.getLogger("dynsparse.popsparse")


@dataclass(frozen=True)
class _Candidate:
    """One method and exchange, priced for all partitions."""

    space: SearchSpace
    exchange_buckets: bool
    buckets: Buckets
    passes: dict[str, tuple[list[TermArray], Any]]
    cycles: np.ndarray
    temporary_bytes: np.ndarray
    allowed: np.ndarray

    def at(self, value: Any, place: int) -> int:
        """One partition's entry of a term, which may be one number for all partitions."""
        return int(np.broadcast_to(value, self.cycles.shape)[place])


@check_types
def make_plan(
    target: Target,
    dtype: Any,
    params: FullyConnectedParams,
    options: Any = None,
    cache: PlanningCache | None = None,
) -> Plan:
    """Plan a sparse fully connected layer on `target`.

    Args:
        target: a `popsparse.machine.Target`.
        dtype: float16 or float32, of the values and the dense operands.
        params: the parameters of the layer.
        options: an `Options` or a mapping. Its `do_grad_a_pass` and `do_grad_w_pass` select the
            passes to plan besides forward; one partition serves them all.
        cache: reuses plans made earlier, and keeps this one.

    Raises:
        ValueError: options or constraints that no partition satisfies, more groups than tiles,
            dense weights (`use_dense`) that do not fit the memory.
    """
    kind = data_type(dtype)
    requested = Options.parse(options).repaired(kind, params.sparsity_params.is_element)
    key = (target, kind, params, requested)
    return _search(*key) if cache is None else cache.find(key, lambda: _search(*key))


@check_types
def matmul_plan(
    target: Target,
    dtype: Any,
    params: MatmulParams,
    options: Any = None,
    cache: PlanningCache | None = None,
) -> Plan:
    """Plan a sparse x dense product, as for a layer, for forward and grad_input jointly."""
    joint = Options.parse(options).with_passes(grad_a=True, grad_w=False)
    return make_plan(target, dtype, params.fully_connected, joint, cache)


def _methods(params: FullyConnectedParams, space: SearchSpace) -> list[Method]:
    if params.sparsity_params.is_element:
        return [Method.ELEMENT]
    x, y = space.block
    fills_units = params.batch_size % Method.BLOCK_AMP.grouping((x, y), space.dtype).z == 0
    return [Method.BLOCK, *([Method.BLOCK_AMP] if fills_units and x % 4 == y % 4 == 0 else [])]


def _candidates(
    target: Any, dtype: DType, params: FullyConnectedParams, options: Options
) -> list[_Candidate]:
    exchanges = [False, True] if options.do_grad_w_pass else [False]
    if (constrained := options.plan_constraints.grad_w_exchange_buckets) is not None:
        exchanges = [constrained]
    candidates = []
    first = SearchSpace(params, options, dtype, target, Method.ELEMENT)
    for method in _methods(params, first):
        space = replace(first, method=method)
        allowed = space.allowed()
        buckets = bucket_arrays(space)
        shared = {"forward": product_terms(space, buckets, grad_input=False)}
        if options.do_grad_a_pass:
            shared["grad_input"] = product_terms(space, buckets, grad_input=True)
        for exchange in exchanges:
            passes = dict(shared)
            if options.do_grad_w_pass:
                passes["grad_weight"] = grad_weight_terms(space, buckets, exchange_buckets=exchange)
            cycles = sum(t.cycles for terms, _ in passes.values() for t in terms)
            bytes_ = np.maximum.reduce([b for _, b in passes.values()])
            candidates.append(_Candidate(space, exchange, buckets, passes, cycles, bytes_, allowed))
    return candidates


def _memory_bounds(target: Any, options: Options) -> list[int | None]:
    """The memory bounds to try: the given proportion, doubled until it is a tile, then none."""
    bounds = [int(target.bytes_per_tile * options.available_memory_proportion)]
    while 0 < bounds[-1] < target.bytes_per_tile:
        bounds.append(2 * bounds[-1])
    return [*bounds, None]


def _search(target: Any, dtype: DType, params: FullyConnectedParams, options: Options) -> Plan:
    candidates = _candidates(target, dtype, params, options)
    if not any(c.allowed.any() for c in candidates):
        raise ValueError(_explain_no_plan(candidates[0].space))
    cycles = np.concatenate([c.cycles for c in candidates])
    bytes_ = np.concatenate([c.temporary_bytes for c in candidates])
    allowed = np.concatenate([c.allowed for c in candidates])
    tried: list[int | None] = []
    for bound in _memory_bounds(target, options):
        tried.append(bound)
        fits = allowed if bound is None else allowed & (bytes_ <= bound)
        if fits.any():
            break
    indices = np.flatnonzero(fits)
    # Proportion 0 asks for the least memory; otherwise time comes first.
    keys = (bytes_[indices], cycles[indices])
    if options.available_memory_proportion == 0:
        keys = keys[::-1]
    order = indices[np.lexsort(keys)]
    width = len(candidates[0].cycles)
    search = Search(
        {
            "partitions": width,
            "candidates": len(candidates),  # methods and exchanges
            "allowed": int(allowed.sum()),
            "fitting": len(indices),
        },
        bounds=tuple(tried),
        runners_up=tuple(
            _summary(candidates[i // width], i % width) for i in order[1 : 1 + RUNNERS_UP].tolist()
        ),
    )
    winner = int(order[0])
    plan = _plan(candidates[winner // width], winner % width, bound, search)
    _log.info("planned %s: %s, %s", params, plan.partition, plan.method)
    return plan


def _summary(candidate: _Candidate, place: int) -> dict[str, Any]:
    x, y, z = candidate.space.partitions[:, place].tolist()
    return {
        "x": x,
        "y": y,
        "z": z,
        "method": candidate.space.method.value,
        "grad_w_exchange_buckets": candidate.exchange_buckets,
        "cycles": int(candidate.cycles[place]),
        "temporary_bytes": int(candidate.temporary_bytes[place]),
        "terms": {
            f"{name} {t.name}": candidate.at(t.cycles, place)
            for name, (terms, _) in candidate.passes.items()
            for t in terms
        },
    }


def _plan(candidate: _Candidate, place: int, bound: int | None, search: Search) -> Plan:
    space, buckets = candidate.space, candidate.buckets
    options, at = space.options, partial(candidate.at, place=place)
    costs = {
        name: PassCost(
            tuple(Term(t.name, at(t.cycles), at(t.temporary_bytes)) for t in terms), at(bytes_)
        )
        for name, (terms, bytes_) in candidate.passes.items()
    }
    values = value_elements(
        at(buckets.groups), buckets.area, options.partials_type, grad_weight=options.do_grad_w_pass
    )
    x, y, z = space.partitions[:, place].tolist()
    is_separate = space.method is Method.ELEMENT and not options.shared_buckets
    request = (space.target, space.dtype, space.params, options)
    return Plan(
        params=space.params,
        options=options,
        dtype=space.dtype,
        target=space.target,
        method=space.method,
        grouping=space.grouping,
        partition=Sizes(space.params.num_groups, x, y, z),
        grad_w_exchange_buckets=candidate.exchange_buckets,
        block_dimensions=space.block,
        buckets=BucketSizes(
            int(values),
            at(buckets.forward_words),
            at(buckets.grad_input_words) if is_separate and options.do_grad_a_pass else 0,
            overflow_words(x),
        ),
        costs=costs,
        dense=dense_passes(*request) if options.plan_constraints.use_dense else {},
        memory_bound=bound,
        search=search,
    )


def _explain_no_plan(space: SearchSpace) -> str:
    """One line on why no partition is allowed, with the nearest allowed value."""
    constraints = space.options.plan_constraints
    _, nx, ny, nz = space.groups
    tiles = space.target.tiles // space.params.num_groups
    product = (constraints.x or 1) * (constraints.y or 1) * (constraints.z or 1)
    if product > tiles:
        return (
            f"plan_constraints ask for {product} tiles a group, the target has {tiles}: "
            "use fewer partitions or a larger target"
        )
    for name, groups in (("x", nx), ("y", ny)):
        value = getattr(constraints, name)
        if value is not None and (even := int(even_parts(groups, value))) != value:
            return (
                f"plan_constraints.partition.{name}={value} leaves parts empty: {groups} groups "
                f"already fit {even} parts of the same size; use {even}"
            )
    if constraints.z is not None and nz % constraints.z:
        return (
            f"plan_constraints.partition.z={constraints.z} must divide the {nz} groups of the "
            f"batch (of {space.grouping.z} each)"
        )
    rules = {name: int(rule.sum()) for name, rule in space.broken_rules().items() if rule.any()}
    worst = max(rules, key=lambda name: rules[name])
    broken = ", ".join(f"{name} ({count})" for name, count in rules.items())
    mend = "use a smaller batch or more tiles" if "16 bits" in worst else "loosen the constraints"
    return f"none of {space.tiles.size} partitions over {tiles} tiles is allowed: {broken}; {mend}"


def parse_passes(passes: str | Iterable[str]) -> tuple[str, ...]:
    """Pass names in the order they run; forward is always among them.

    Raises:
        ValueError: an unknown name.
    """
    if not isinstance(passes, Iterable):
        raise TypeError(f"passes must be names such as {PASSES}, got {shorten(passes)}")
    names = passes.split(",") if isinstance(passes, str) else list(passes)
    names = [str(name).strip() for name in names]
    for name in names:
        if name not in PASSES:
            raise ValueError(f"passes must be among {', '.join(PASSES)}, got {name!r}")
    return tuple(name for name in PASSES if name in names or name == "forward")


@check_types
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
        target: a `popsparse.machine.Target`; defaults to the Mk2.
        passes: the passes that will run, names or a comma-separated string; one partition serves
            them all. Forward is always included.
        options: `Options` or a mapping of further options.
        cache: reuses plans made earlier.

    Raises:
        ValueError, TypeError: an invalid size, density, pass or option, or no plan that the
            constraints allow.

    >>> from popsparse.machine.target import Target
    >>> plan(512, 512, 64, 0.1, target=Target(tiles=24)).partition
    Sizes(groups=1, x=24, y=1, z=1)
    """
    target = Target.mk2() if target is None else target
    names = parse_passes(passes)
    requested = Options.parse(options).with_passes(
        grad_a="grad_input" in names, grad_w="grad_weight" in names
    )
    sparsity = SparsityParams(block_size)
    params = FullyConnectedParams(sparsity, density, batch, 1, in_, out)
    return make_plan(target, dtype, params, requested, cache)
