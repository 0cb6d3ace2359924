"""Which options of `dynsparse matmul` apply to what; one that was given and does not is refused."""

from __future__ import annotations

from collections.abc import Collection

from dynsparse.cli.matmul.request import Request

_SPARSE = ("dynamic", "static")

METHODS: dict[str, tuple[str, ...]] = {
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
RUNS: dict[str, tuple[str, ...]] = {
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
        methods = METHODS.get(name)
        if methods is not None and request.method not in methods:
            raise ValueError(
                f"{_flag(name)}: applies to --method {' and '.join(methods)}, got --method "
                f"{request.method}: leave it out"
            )
        if request.plan_only and request.method in RUNS.get(name, ()):
            raise ValueError(
                f"{_flag(name)}: applies to what runs, got --plan-only: leave one of them out"
            )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
