"""The figures a training ends with: the JSON and the table."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from dynsparse.apps.common.outputs import bytes_text
from dynsparse.apps.common.training import Scores
from dynsparse.apps.lm.sizes import Memory
from dynsparse.apps.lm.training import Training
from dynsparse.nn import SparseLinear


def training_figures(
    training: Training, valid: Scores | None, test: Scores | None
) -> dict[str, Any]:
    """What `--json` writes. Losses are nats per token; `accuracy` and `loss` are of the test part,
    None where it was not looked at.
    """
    model = training.model
    sparse = [m for m in model.modules() if isinstance(m, SparseLinear)]
    dense = sum(layer.in_features * layer.out_features for layer in sparse)
    held = sum(layer.values.numel() for layer in sparse)
    count = sum(parameter.numel() for parameter in model.parameters())
    scores = {
        f"{prefix}{name}": None if of is None else getattr(of, name)
        for prefix, of in (("", test), ("valid_", valid))
        for name in ("accuracy", "loss", "perplexity")
    }
    return {
        **scores,
        "density": held / dense if dense else 1.0,
        "data": training.corpus.name,
        "vocabulary": training.corpus.size,
        **training.figures(),
        "tokens": training.step * training.tokens_per_step,
        "parameters": {"held": count, "with_zeros": count - held + dense},
        "network": {
            name: getattr(training.built, name)
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
