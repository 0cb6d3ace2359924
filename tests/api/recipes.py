"""Valid arguments of every public callable; the tests replace one of them by a wrong value.

Keys are "module.name" for names in `__all__` and "module.class.method" for methods. Values are a
callable with keyword arguments and a function that creates valid ones for every call.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

MODULES = (
    "dynsparse",
    "dynsparse.nn",
    "dynsparse.nn.attention_patterns",
    "dynsparse.ops",
    "dynsparse.ops.block_sparse",
    "dynsparse.ops.linear",
    "dynsparse.ops.embedding",
    "dynsparse.ops.grow",
    "dynsparse.pattern",
    "dynsparse.allocation",
    "dynsparse.training",
    "popsparse.machine",
    "popsparse",
    "popsparse.tensor_ops",
    "popsparse.block_sparse",
    "dynsparse.training.records",
    "dynsparse.training.checkpoint",
    "dynsparse.data",
    "dynsparse.bench",
    "popsparse.report",
    "dynsparse.integrations.follower",
    "dynsparse.distributed",
    "dynsparse.report",
    "dynsparse.tracing",
    *(["dynsparse.integrations.keras"] if find_spec("keras") is not None else []),
    "dynsparse.selfcheck",
)


class Recipe(NamedTuple):
    call: Callable[..., Any]
    make: Callable[[], dict[str, Any]]
    also: tuple[type[BaseException], ...] = ()  # errors that its docstring names beside the three


def of(thing, method, **arguments):
    """Make the recipe of a method: `thing` creates the object, and arguments are created anew."""
    return Recipe(
        lambda **named: getattr(thing(), method)(**named),
        lambda: {name: make() for name, make in arguments.items()},
    )


def call(function, also=(), **arguments):
    return Recipe(function, lambda: {name: make() for name, make in arguments.items()}, tuple(also))


def used(maker, *inputs):
    """Call `maker` and then its result: arguments that it accepts must also work."""

    def run(**named):
        return maker(**named)(*inputs)

    return run


def public_callables() -> dict[str, Any]:
    """Return every callable that a public module lists, by its first name; each object once."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            thing = getattr(module, name)
            if callable(thing) and not inspect.ismodule(thing) and id(thing) not in seen:
                seen.add(id(thing))
                found[f"{module_name}.{name}"] = thing
    return found
