"""Where the figures of a training go besides the terminal: TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from dynsparse.apps.lm.options import Options

__all__ = ["Logger", "open_loggers"]


class Logger(Protocol):
    def log(self, figures: dict[str, Any]) -> None:
        """One entry of the history."""
        ...

    def close(self, figures: dict[str, Any]) -> None:
        """The final figures, and no more."""
        ...


def open_loggers(options: Options) -> list[Logger]:
    """The loggers the options ask for.

    Raises:
        ModuleNotFoundError: tensorboard or wandb is asked for and not installed.
    """
    loggers: list[Logger] = []
    if options.tensorboard is not None:
        loggers.append(_TensorBoard(options.tensorboard))
    if options.use_wandb:
        loggers.append(_Wandb(options))
    return loggers


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

    def log(self, figures: dict[str, Any]) -> None:
        for name, value in figures.items():
            if name != "step":
                self._writer.add_scalar(name, value, figures["step"])

    def close(self, figures: dict[str, Any]) -> None:
        for name in ("loss", "perplexity", "accuracy"):
            if figures[name] is not None:
                self._writer.add_scalar(f"test_{name}", figures[name], figures["steps"])
        final = {name: value for name, value in figures.items() if name != "history"}
        self._writer.add_text("figures", f"```json\n{json.dumps(final, indent=2)}\n```")
        self._writer.close()


class _Wandb:
    def __init__(self, options: Options) -> None:
        try:
            import wandb
        except ImportError:
            raise ModuleNotFoundError(
                "--use-wandb: expected the package wandb, which is not installed: pip install wandb"
            ) from None
        self._run = wandb.init(
            project=options.wandb_project_name or "dynsparse-language-model",
            name=options.wandb_name,
            tags=list(options.wandb_tags) or None,
            config={
                name: str(value) if isinstance(value, Path) else value
                for name, value in vars(options).items()
            },
        )

    def log(self, figures: dict[str, Any]) -> None:
        self._run.log({n: v for n, v in figures.items() if n != "step"}, step=figures["step"])

    def close(self, figures: dict[str, Any]) -> None:
        names = ("loss", "perplexity", "accuracy")
        self._run.summary.update({f"test_{name}": figures[name] for name in names})
        self._run.finish()
