"""What a person sees while the model trains: a line per report, and a bar on a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Display"]

_COLUMNS = {
    "step": 9, "loss": 9, "valid": 9, "perplexity": 12, "accuracy": 10, "replaced": 11,
    "tokens/s": 10,
}  # fmt: skip


class Display:
    """A context: `show` every entry of the history."""

    def __init__(self, console: Console, step: int, last_step: int) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.completed:,}/{task.total:,}"),
            BarColumn(bar_width=24),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=last_step, completed=step)

    def __enter__(self) -> Display:
        self._console.print(_aligned(*_COLUMNS), style="bold", highlight=False)
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, entry: dict[str, Any]) -> None:
        """One line: training loss, then validation loss, perplexity and accuracy."""
        self._bar.update(self._task, completed=entry["step"])
        line = _aligned(
            f"{entry['step']:,}",
            f"{entry['loss']:.4f}",
            f"{entry['valid_loss']:.4f}",
            f"{entry['valid_perplexity']:.3f}",
            f"{100 * entry['valid_accuracy']:.2f} %",
            f"{entry['replaced']:,}",
            f"{entry['tokens_per_second']:,.0f}",
        )
        self._console.print(line, highlight=False)


def _aligned(*cells: str) -> str:
    return "".join(c.rjust(width) for c, width in zip(cells, _COLUMNS.values(), strict=True))
