"""Where the figures of a training go besides the terminal: TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dynsparse.apps.common.options import TrainingOptions


class Logger(Protocol):
    def log(self, step: int, figures: dict[str, Any]) -> None:
        """Figures of the steps up to `step`: loss, accuracy, learning_rate, replaced, ..."""
        ...

    def close(self, figures: dict[str, Any]) -> None:
        """The final figures of the training, and no more."""
        ...


@dataclass(frozen=True)
class Names:
    """How an application names its figures: prefixes in TensorBoard, and its project at wandb.

    `tested` are those of the final figures that are of the test.
    """

    train: str = ""
    test: str = "test_"
    tested: tuple[str, ...] = ("accuracy", "loss")
    project: str | None = None


def open_loggers(options: TrainingOptions, names: Names) -> list[Logger]:
    """The loggers the options ask for.

    Raises:
        ModuleNotFoundError: tensorboard or wandb is asked for and not installed.
    """
    loggers: list[Logger] = []
    if options.tensorboard is not None:
        loggers.append(_TensorBoard(options.tensorboard, names))
    if options.use_wandb:
        loggers.append(_Wandb(options, names))
    return loggers


class _TensorBoard:
    def __init__(self, folder: Path, names: Names) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ModuleNotFoundError(
                "--tensorboard: expected the package tensorboard, which is not installed: "
                "pip install tensorboard"
            ) from None
        self._writer = SummaryWriter(str(folder))
        self._names = names

    def log(self, step: int, figures: dict[str, Any]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(f"{self._names.train}{name}", value, step)

    def close(self, figures: dict[str, Any]) -> None:
        for name in self._names.tested:
            if figures[name] is not None:
                self._writer.add_scalar(
                    f"{self._names.test}{name}", figures[name], figures["steps"]
                )
        final = {name: value for name, value in figures.items() if name != "history"}
        self._writer.add_text("figures", f"```json\n{json.dumps(final, indent=2)}\n```")
        self._writer.close()


class _Wandb:
    def __init__(self, options: TrainingOptions, names: Names) -> None:
        try:
            import wandb
        except ImportError:
            raise ModuleNotFoundError(
                "--use-wandb: expected the package wandb, which is not installed: pip install wandb"
            ) from None
        self._tested = names.tested
        self._run = wandb.init(
            project=options.wandb_project_name or names.project,
            name=options.wandb_name,
            tags=list(options.wandb_tags) or None,
            config={
                name: str(value) if isinstance(value, Path) else value
                for name, value in vars(options).items()
            },
        )

    def log(self, step: int, figures: dict[str, Any]) -> None:
        self._run.log(figures, step=step)

    def close(self, figures: dict[str, Any]) -> None:
        self._run.summary.update({f"test_{name}": figures[name] for name in self._tested})
        self._run.finish()
