"""What a person sees while a network trains: a table's lines, and a bar on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Display(Progress):
    """A context that prints the heads of the columns, and then what is shown.

    Args:
        columns: {head: width}.
        total, completed: steps of the whole training, and those done before.
    """

    def __init__(
        self, console: Console, columns: dict[str, int], total: int, completed: int
    ) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=14),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._widths = columns
        self._bar = self.add_task("", total=total, completed=completed)

    def __enter__(self) -> Display:
        self.console.print(self.row(*self._widths), style="bold", highlight=False)
        super().__enter__()
        return self

    def row(self, *cells: str) -> str:
        """The cells, each as wide as its column."""
        return "".join(c.rjust(w) for c, w in zip(cells, self._widths.values(), strict=True))

    def show(self, completed: int, beside_bar: str, line: str | None) -> None:
        """The bar as far as `completed`, with a text beside it, and a line above it to stay."""
        self.update(self._bar, description=beside_bar, completed=completed)
        if line is not None:
            self.console.print(line, highlight=False)
