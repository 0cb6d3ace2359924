"""The command `dynsparse matmul`: its options, those that apply, and the method that runs."""

from __future__ import annotations

from collections.abc import Collection
from inspect import Parameter, signature
from typing import Any, get_type_hints

import typer

from dynsparse.cli.matmul.request import Request

_SPARSE = ("dynamic", "static")

_METHODS_OF: dict[str, tuple[str, ...]] = {
    "density": _SPARSE,
    "block_size": _SPARSE,
    "seeds": _SPARSE,
    "options": _SPARSE,
    "report_plan": _SPARSE,
    "weighted_area_begin": _SPARSE,
    "weighted_area_end": _SPARSE,
    "weighted_area_weighting": _SPARSE,
    "oversize": ("dynamic",),
    "update": ("dynamic",),
    "plan_constraints": ("dynamic",),
    "ignore_memory": ("dynamic",),
}
"""Option -> the methods it is for; the others are for all."""

_PATTERN = (
    "seed",
    "weighted_area_begin",
    "weighted_area_end",
    "weighted_area_weighting",
)
_RUNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("seeds", "ignore_data", "ignore_memory", "update", "profile"),
        ("dynamic", "static", "dense"),
    ),
    # A static product is planned for its pattern.
    **dict.fromkeys(_PATTERN, ("dynamic", "dense")),
}
"""Option -> the methods with which it counts for runs alone, and not for plans."""


def check_applies(request: Request, given: Collection[str]) -> None:
    """Raise ValueError for the first of the options `given` that would be ignored."""
    for name in given:
        methods = _METHODS_OF.get(name)
        if methods is not None and request.method not in methods:
            raise ValueError(
                f"{_flag(name)}: applies to --method {' and '.join(methods)}, got --method "
                f"{request.method}: leave it out"
            )
        if request.plan_only and request.method in _RUNS.get(name, ()):
            raise ValueError(
                f"{_flag(name)}: applies to what runs, got --plan-only: leave one of them out"
            )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def matmul(context: typer.Context, **flags: Any) -> None:
    """A sparse x dense product on the tile machine: plan, cycles, memory, propagation.

    The plan serves forward and grad_input jointly, whatever runs; grad_weight too where asked for.
    """
    request = Request(**flags)
    sources = {name: context.get_parameter_source(name) for name in flags}
    given = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    check_applies(request, given)
    from dynsparse.cli.matmul.methods import METHODS  # loads the machine

    METHODS[request.method](request)


# The command has the request's fields as its options.
_request = signature(Request, eval_str=True)
vars(matmul)["__signature__"] = _request.replace(
    parameters=[
        Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        *_request.parameters.values(),
    ]
)
_hints = get_type_hints(Request, include_extras=True)
matmul.__annotations__ = {"context": typer.Context, **_hints}
