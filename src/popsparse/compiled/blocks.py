"""Blocks of a model: where its parts run, if the machine has several processors."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from dynsparse._core.checks import check_integer, check_kind

_Module = TypeVar("_Module", bound=nn.Module)

tracers: list[Any] = []
"""What follows the model that is traced, the innermost last."""

_MARK = "_begins_block"


def _check(user_id: Any, ipu_id: Any) -> tuple[str, int | None]:
    check_kind("user_id", user_id, (str, int, type(None)), "a name, a number or None")
    number = None if ipu_id is None else check_integer("ipu_id", ipu_id, 0)
    return "" if user_id is None else str(user_id), number


def BeginBlock(
    module: _Module, user_id: str | int | None = None, ipu_id: int | None = None
) -> _Module:
    """Mark a module: it, and all that runs after it until another block begins, is of this block.

    A block on another processor than the one before begins a stage of the pipeline that
    `popsparse.compile` makes of a model. What runs before any block is on processor 0. Elsewhere
    blocks change nothing. Source: PopTorch user guide, "poptorch.BeginBlock".

    Args:
        module: marked in place.
        user_id: a name for reports.
        ipu_id: the processor; None for that of the block before.

    Returns:
        The module.

    Raises:
        TypeError: arguments of another kind. ValueError: an `ipu_id` below 0.
    """
    check_kind("module", module, nn.Module, "a torch.nn.Module")
    setattr(module, _MARK, _check(user_id, ipu_id))
    return module


class Block:
    """A block as a context: `with poptorch.Block(ipu_id=1):` inside a model's forward.

    What runs after it stays on its processor until another block begins. Arguments and errors as
    of `BeginBlock`.
    """

    def __init__(self, user_id: str | int | None = None, ipu_id: int | None = None) -> None:
        self._block = _check(user_id, ipu_id)

    def __enter__(self) -> Block:
        for tracer in tracers[-1:]:
            tracer.begin(*self._block)
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def block_of(module: nn.Module) -> tuple[str, int | None] | None:
    """The name and processor of the block that begins with a module, if one does."""
    block: tuple[str, int | None] | None = getattr(module, _MARK, None)
    return block
