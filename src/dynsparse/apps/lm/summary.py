"""The figures a training ends with: the JSON and the table."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from dynsparse.apps.lm.options import Options
from dynsparse.apps.lm.sizes import Memory
from dynsparse.apps.lm.training import Report, Scores, Training
from dynsparse.nn import SparseLinear

__all__ = ["bytes_text", "history_entry", "summary_table", "training_figures"]


def history_entry(report: Report) -> dict[str, Any]:
    """One report as plain figures: losses in nats per token, accuracies as shares."""
    return {
        "step": report.step,
        "loss": report.train.loss,
        "accuracy": report.train.accuracy,
        "valid_loss": report.valid.loss,
        "valid_perplexity": report.valid.perplexity,
        "valid_accuracy": report.valid.accuracy,
        "learning_rate": report.learning_rate,
        "replaced": report.replaced,
        "tokens_per_second": report.tokens / report.seconds if report.seconds else 0.0,
    }


def training_figures(
    training: Training, options: Options, valid: Scores | None, test: Scores | None
) -> dict[str, Any]:
    """What `--json` writes. Losses are nats per token; `accuracy` and `loss` are of the test part,
    None where it was not looked at.

    Args:
        options: the user's own, before a dense model was narrowed.
    """
    model = training.model
    sparse = [m for m in model.modules() if isinstance(m, SparseLinear)]
    dense = sum(layer.in_features * layer.out_features for layer in sparse)
    held = sum(layer.values.numel() for layer in sparse)
    count = sum(parameter.numel() for parameter in model.parameters())
    built = training.options
    return {
        "accuracy": None if test is None else test.accuracy,
        "loss": None if test is None else test.loss,
        "perplexity": None if test is None else test.perplexity,
        "valid_accuracy": None if valid is None else valid.accuracy,
        "valid_loss": None if valid is None else valid.loss,
        "valid_perplexity": None if valid is None else valid.perplexity,
        "density": held / dense if dense else 1.0,
        "seconds": training.seconds,
        "updates": training.updates,
        "method": options.method,
        "data": training.corpus.name,
        "vocabulary": training.corpus.size,
        "seed": training.seed,
        "steps": training.step,
        "tokens": training.step * training.tokens_per_step,
        "replaced": training.replaced,
        "seconds_per_step": training.seconds / max(1, training.step),
        "update_share": training.update_seconds / training.seconds if training.seconds else 0.0,
        "parameters": {"held": count, "with_zeros": count - held + dense},
        "network": {
            name: getattr(built, name)
            for name in ("layers", "hidden_size", "ff_size", "heads", "sequence_length")
        },
        "history": training.history,
    }


def summary_table(figures: dict[str, Any]) -> Table:
    """The closing table."""
    table = Table(title=f"{figures['method']} on {figures['data']}", title_style="bold")
    table.add_column("")
    for heading in ("loss", "perplexity", "accuracy"):
        table.add_column(heading, justify="right")
    for part, prefix in (("validation", "valid_"), ("test", "")):
        if figures[f"{prefix}loss"] is not None:
            table.add_row(
                part,
                f"{figures[f'{prefix}loss']:.4f}",
                f"{figures[f'{prefix}perplexity']:.3f}",
                f"{100 * figures[f'{prefix}accuracy']:.2f} %",
            )
    return table


def closing_line(figures: dict[str, Any]) -> str:
    """Parameters, steps, time and updates, in one line."""
    held, zeros = figures["parameters"]["held"], figures["parameters"]["with_zeros"]
    text = f"{held:,} parameters"
    if zeros != held:
        text += f" of {zeros:,} ({100 * held / zeros:.1f} %)"
    if figures["steps"]:
        text += (
            f", {figures['steps']:,} steps of {1000 * figures['seconds_per_step']:.1f} ms, "
            f"{figures['updates']} pattern updates ({figures['replaced']:,} connections, "
            f"{100 * figures['update_share']:.1f} % of the time)"
        )
    return text


def memory_line(memory: Memory) -> str:
    """The estimate in one line, to be shown before anything is made."""
    return (
        f"memory: about {bytes_text(memory.total)} (weights, gradients and optimizer "
        f"{bytes_text(memory.state)}, patterns {bytes_text(memory.pattern)}, the work of a step "
        f"{bytes_text(memory.work)})"
    )


def bytes_text(count: int) -> str:
    """KiB, MiB or GiB, whichever reads best."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1024:,.1f} KiB"
