"""Where the figures of a training go besides the terminal: a text file, TensorBoard, wandb."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from dynsparse.apps.pictures.options import PictureOptions

__all__ = ["Logger", "open_loggers"]


class Logger(Protocol):
    def log(self, step: int, figures: dict[str, float]) -> None:
        """Figures of the steps up to `step`: loss, accuracy, learning_rate, replaced, ..."""
        ...

    def close(self, figures: dict[str, Any]) -> None:
        """The final figures of the training, and no more."""
        ...


def open_loggers(options: PictureOptions, *, resumes: bool) -> list[Logger]:
    """The loggers the options ask for.

    Raises:
        OSError: the log file cannot be written.
        ModuleNotFoundError: tensorboard or wandb is asked for and not installed.
    """
    loggers: list[Logger] = []
    if options.log is not None:
        loggers.append(_TextLog(options.log, options, resumes=resumes))
    if options.tensorboard is not None:
        loggers.append(_TensorBoard(options.tensorboard))
    if options.use_wandb:
        loggers.append(_Wandb(options))
    return loggers


class _TextLog:
    """The original's log: a heading, then "<steps> <training accuracy>" per report."""

    def __init__(self, path: Path, options: PictureOptions, *, resumes: bool) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (resumes and path.exists()):
            path.write_text(f"Iteration {options.label}\n")

    def log(self, step: int, figures: dict[str, float]) -> None:
        with self._path.open("a") as file:
            file.write(f"{step} {figures['accuracy']:.8f}\n")

    def close(self, figures: dict[str, Any]) -> None:
        """Every line was written when it was logged."""


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ModuleNotFoundError(
                "--tensorboard: expected the package tensorboard, which is not installed: "
                "pip install tensorboard"
            ) from None
        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(f"train/{name}", value, step)

    def close(self, figures: dict[str, Any]) -> None:
        for name in ("accuracy", "loss"):
            if figures[name] is not None:
                self._writer.add_scalar(f"test/{name}", figures[name], figures["steps"])
        self._writer.add_text("figures", f"```json\n{json.dumps(figures, indent=2)}\n```")
        self._writer.close()


class _Wandb:
    def __init__(self, options: PictureOptions) -> None:
        try:
            import wandb
        except ImportError:
            raise ModuleNotFoundError(
                "--use-wandb: expected the package wandb, which is not installed: pip install wandb"
            ) from None
        self._run = wandb.init(
            project=options.wandb_project_name,
            name=options.wandb_name,
            tags=list(options.wandb_tags) or None,
            config={
                name: str(value) if isinstance(value, Path) else value
                for name, value in vars(options).items()
            },
        )

    def log(self, step: int, figures: dict[str, float]) -> None:
        self._run.log(figures, step=step)

    def close(self, figures: dict[str, Any]) -> None:
        self._run.summary.update({f"test_{k}": figures[k] for k in ("accuracy", "loss")})
        self._run.finish()
