"""`dynsparse matmul`: a sparse or dense product on the tile machine."""

from __future__ import annotations

from typing import Any

from dynsparse.options import add_flags, check_applies
from popsparse.cli.matmul.request import Request

__all__ = ["matmul"]


@add_flags(Request)
def matmul(values: dict[str, Any]) -> None:
    """A sparse x dense product on the tile machine: plan, cycles, memory, propagation.

    The plan always serves both forward and grad_input; grad_weight only on request.
    """
    request = Request(**values)
    check_applies(request, values)
    from popsparse.cli.matmul.methods import METHODS  # loads the machine

    METHODS[request.method](request)
