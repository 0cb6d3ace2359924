"""Functions that hear of pattern updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dynsparse.pattern import Rewiring

__all__ = ["UpdateHook", "call_all"]

UpdateHook = Callable[[int, dict[str, Rewiring]], None]
"""Called as hook(step, rewirings by layer name) after each pattern update."""


def call_all(hooks: Iterable[UpdateHook], step: int, rewirings: dict[str, Rewiring]) -> None:
    """Call all of them, whatever one of them raises; then raise the first error."""
    first: BaseException | None = None
    for hook in hooks:
        try:
            hook(step, rewirings)
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
