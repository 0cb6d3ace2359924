"""What a person sees while the network trains: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dynsparse.apps.pictures.summary import density
from dynsparse.apps.pictures.training import Report, Training

__all__ = ["Display"]

_COLUMNS = {"epoch": 7, "loss": 9, "accuracy": 10, "density": 10, "replaced": 11, "ms/step": 9}


class Display:
    """A context: `show` every report of the training.

    Each epoch leaves one line of a table. On a terminal the next line is alive: the figures of the
    last report, a bar and the time left.
    """

    def __init__(self, console: Console, training: Training) -> None:
        self._console = console
        self._epochs = training.options.epochs
        self._network = training.network
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=14),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=training.total_steps, completed=training.step)

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

    def show(self, report: Report, whole: Report | None) -> None:
        """Show one report, and the line of the whole epoch if it ends one."""
        self._bar.update(self._task, description=self._row(report), completed=report.step)
        if whole is not None:
            self._console.print(self._row(whole), highlight=False)

    def _row(self, report: Report) -> str:
        return _aligned(
            f"{report.epoch}/{self._epochs}",
            f"{report.scores.loss:.4f}",
            f"{100 * report.scores.accuracy:.2f} %",
            f"{100 * density(self._network):.2f} %",
            f"{report.replaced:,}",
            f"{1000 * report.seconds / report.steps:.3f}",
        )


def _aligned(*cells: str) -> str:
    return "".join(c.rjust(width) for c, width in zip(cells, _COLUMNS.values(), strict=True))
