"""Functions that hear of pattern updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from dynsparse.pattern import Rewiring

_log = logging.getLogger(__name__)

UpdateHook = Callable[[int, dict[str, Rewiring]], None]
"""Called as hook(step, rewirings by layer name) after each pattern update."""


def call_all(hooks: Iterable[UpdateHook], step: int, rewirings: dict[str, Rewiring]) -> None:
    """Call all of them, whatever one of them raises; then raise the first error."""
    if _log.isEnabledFor(logging.INFO):
        _log.info("update after step %d of %d layers", step, len(rewirings))
    if _log.isEnabledFor(logging.DEBUG):
        for name, one in rewirings.items():
            _log.debug(
                "layer %r: %d of %d blocks dropped, %d grown",
                name, len(one.dropped), one.before.nnz, len(one.grown),
            )  # fmt: skip
    first: BaseException | None = None
    for hook in hooks:
        try:
            hook(step, rewirings)
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
