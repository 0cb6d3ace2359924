"""What a person sees while a network trains: a table's lines, and a bar on a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Display"]


class Display:
    """A context that prints the heads of the columns, and then what is shown.

    Args:
        columns: {head: width}.
        total, completed: steps of the whole training, and those done before.
    """

    def __init__(
        self, console: Console, columns: dict[str, int], total: int, completed: int
    ) -> None:
        self._console = console
        self._columns = columns
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=14),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=completed)

    def __enter__(self) -> Display:
        self._console.print(self.row(*self._columns), style="bold", highlight=False)
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def row(self, *cells: str) -> str:
        """The cells, each as wide as its column."""
        return "".join(c.rjust(w) for c, w in zip(cells, self._columns.values(), strict=True))

    def show(self, completed: int, beside_bar: str, line: str | None) -> None:
        """The bar as far as `completed`, with a text beside it, and a line above it to stay."""
        self._bar.update(self._task, description=beside_bar, completed=completed)
        if line is not None:
            self._console.print(line, highlight=False)
