"""What a person sees while the network trains: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dynsparse.apps.mnist.summary import density
from dynsparse.apps.mnist.training import Report, Training

__all__ = ["Display"]

_COLUMNS = {"epoch": 7, "loss": 9, "accuracy": 10, "density": 10, "replaced": 11, "ms/step": 9}


class Display:
    """A context: `show` every report of the training.

    Each epoch leaves one line of a table; on a terminal a bar below it moves with every report.
    """

    def __init__(self, console: Console, training: Training) -> None:
        self._console = console
        self._epochs = training.options.epochs
        self._density = f"{100 * density(training.network):.2f} %"
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(
            "starting", total=training.total_steps, completed=training.step, figures=""
        )

    def __enter__(self) -> Display:
        self._line(tuple(_COLUMNS), "bold")
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
        """One report, and the figures of its whole epoch if it ends one."""
        cells = self._cells(report)
        figures = "  ".join(f"{name} {cells[name]}" for name in ("loss", "accuracy", "replaced"))
        self._bar.update(
            self._task,
            description=f"epoch {cells['epoch']}",
            completed=report.step,
            figures=f"{figures}  {cells['ms/step']} ms/step",
        )
        if whole is not None:
            self._line(tuple(self._cells(whole).values()))

    def _cells(self, report: Report) -> dict[str, str]:
        return {
            "epoch": f"{report.epoch}/{self._epochs}",
            "loss": f"{report.scores.loss:.4f}",
            "accuracy": f"{100 * report.scores.accuracy:.2f} %",
            "density": self._density,
            "replaced": f"{report.replaced:,}",
            "ms/step": f"{1000 * report.seconds / report.steps:.3f}",
        }

    def _line(self, cells: tuple[str, ...], style: str | None = None) -> None:
        padded = (cell.rjust(width) for cell, width in zip(cells, _COLUMNS.values(), strict=True))
        self._console.print("".join(padded), style=style, highlight=False)
