"""The command: what was asked for, handed to its method."""

from __future__ import annotations

from importlib import import_module
from inspect import Parameter, signature
from typing import Any, get_type_hints

import typer

from dynsparse.cli.matmul.applies import check_applies
from dynsparse.cli.matmul.request import Request


def matmul(context: typer.Context, **flags: Any) -> None:
    """A sparse x dense product on the tile machine: plan, cycles, memory, propagation.

    The plan serves forward and grad_input jointly, whatever runs; grad_weight too where asked for.
    """
    request = Request(**flags)
    sources = {name: context.get_parameter_source(name) for name in flags}
    given = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    check_applies(request, given)
    # Only the method that runs is loaded.
    import_module(f"dynsparse.cli.matmul.{request.method}").run(request)


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
