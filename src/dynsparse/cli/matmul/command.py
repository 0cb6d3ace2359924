"""The command: what was asked for, handed to its method."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any, get_type_hints

from dynsparse.cli.matmul.request import Request

__all__ = ["matmul"]


def matmul(**flags: Any) -> None:
    """A sparse x dense product on the tile machine: plan, cycles, memory, propagation.

    The plan serves forward and grad_input jointly, whatever runs; grad_weight too where asked for.
    """
    request = Request(**flags)
    # Only the method that runs is loaded.
    import_module(f"dynsparse.cli.matmul.{request.method}").run(request)


# The command has the request's fields as its options.
vars(matmul)["__signature__"] = signature(Request, eval_str=True)
matmul.__annotations__ = get_type_hints(Request, include_extras=True)
