"""Blocks of a model: placement of its parts on a machine with several processors."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from dynsparse._core.checks import check_integer, check_kind

_Module = TypeVar("_Module", bound=nn.Module)

tracers: list[Any] = []
"""The observers of the model being traced, the innermost last."""

_MARK = "_begins_block"


def _check(user_id: Any, ipu_id: Any) -> tuple[str, int | None]:
    check_kind("user_id", user_id, (str, int, type(None)), "a name, a number or None")
    number = None if ipu_id is None else check_integer("ipu_id", ipu_id, 0)
    return "" if user_id is None else str(user_id), number


def BeginBlock(
    module: _Module, user_id: str | int | None = None, ipu_id: int | None = None
) -> _Module:
    """Begin a block at a module: the block lasts until another begins.

    A block on a different processor than the previous one begins a stage of the pipeline of
    `popsparse.compile`. Operators before any block run on processor 0. Without `compile`, blocks
    have no effect. Source: PopTorch user guide, "poptorch.BeginBlock".

    Args:
        module: the module, marked in place.
        user_id: a name for reports.
        ipu_id: the processor; None for that of the previous block.

    Returns:
        The module.

    Raises:
        TypeError: arguments of other types. ValueError: an `ipu_id` below 0.
    """
    check_kind("module", module, nn.Module, "a torch.nn.Module")
    setattr(module, _MARK, _check(user_id, ipu_id))
    return module


class Block:
    """A block as a context manager: `with poptorch.Block(ipu_id=1):` inside a model's forward.

    Later operators stay on its processor until another block begins. Arguments and errors as for
    `BeginBlock`.
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
    """The name and processor of the block that begins at a module, if any."""
    block: tuple[str, int | None] | None = getattr(module, _MARK, None)
    return block
