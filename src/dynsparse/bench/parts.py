"""What each part of a transformer takes of a training step, forward and backward.

A clock runs on for the innermost part that the step is in. Identities in the graph around modules
tell it where backward enters and leaves them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from dynsparse.nn import SparseLinear

BLOCK_PARTS = (
    "matrices of attention",
    "attention between them",
    "matrices of the MLPs",
    "activation",
    "norms",
    "dropout",
    "residuals and other",
    "optimizer of the blocks",
)
PARTS = (*BLOCK_PARTS, "embedding", "head", "loss", "optimizer of the rest", "other")


class Clock:
    """Seconds of every part since `start`. Parts inside others do not count for these."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = ["other"]
        self._last = 0.0

    def start(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._open = ["other"]
        self._last = time.perf_counter()

    def stop(self) -> dict[str, float]:
        """The seconds, by part."""
        self._charge()
        return self.seconds

    def enter(self, part: str) -> None:
        self._charge()
        self._open.append(part)

    def leave(self, part: str) -> None:
        """Of the part, and of what was entered inside and not left."""
        self._charge()
        if part in self._open:
            while self._open.pop() != part:
                pass

    def entered_by_gradient(self, part: str, x: Tensor) -> Tensor:
        """x, whose gradient's arrival in backward means that the part is entered."""
        return _told(x, lambda: self.enter(part))

    def left_by_gradient(self, part: str, x: Tensor) -> Tensor:
        """x, whose gradient's arrival in backward means that the part is left."""
        return _told(x, lambda: self.leave(part))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)

    def _charge(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._last
        self._last = now


def _told(x: Tensor, tell: Callable[[], None]) -> Tensor:
    if not x.requires_grad:
        return x
    x = x.view_as(x)  # a node of its own: others may use the tensor that was given
    x.register_hook(lambda _: tell())
    return x


def blocks_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The transformer's blocks, and their name in the model."""
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    return found[0]


def watch(model: nn.Module, clock: Clock) -> None:
    """Hooks on the modules that are parts, for as long as the model lives."""
    blocks, _ = blocks_of(model)
    for name, module in model.named_modules():
        part = _part(name, module, blocks)
        if part is not None:
            _watch(module, clock, part)


def _part(name: str, module: nn.Module, blocks: str) -> str | None:
    """The part that a module is, None where it belongs to what is around it."""
    if not name.startswith(blocks + "."):
        if next(module.children(), None) is not None or not name:
            return None
        is_input = re.search(r"embed|\.w[tp]e$|\.drop$", name) is not None
        return "embedding" if is_input else "head"
    inside = name[len(blocks) + 1 :]
    if "." not in inside:
        return "residuals and other"
    in_attention = "att" in inside
    kind = type(module).__name__
    if isinstance(module, (nn.Linear, SparseLinear)):
        return "matrices of attention" if in_attention else "matrices of the MLPs"
    if isinstance(module, nn.LayerNorm):
        return "norms"
    if isinstance(module, nn.Dropout):
        return "dropout"
    if "activation" in kind.lower() or isinstance(module, nn.GELU):
        return "activation"
    # What multiplies queries by keys holds the matrices that make them.
    holds = any(isinstance(m, (nn.Linear, SparseLinear)) for m in module.children())
    return "attention between them" if kind.endswith("Attention") and holds else None


def _watch(module: nn.Module, clock: Clock, part: str) -> None:
    def before(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        clock.enter(part)
        if args and isinstance(args[0], Tensor):
            args = (clock.left_by_gradient(part, args[0]), *args[1:])
        elif isinstance(given.get("hidden_states"), Tensor):
            x = clock.left_by_gradient(part, given["hidden_states"])
            given = {**given, "hidden_states": x}
        return args, given

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        clock.leave(part)
        if isinstance(output, Tensor):
            return clock.entered_by_gradient(part, output)
        if isinstance(output, tuple) and isinstance(output[0], Tensor):
            return (clock.entered_by_gradient(part, output[0]), *output[1:])
        return output

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
