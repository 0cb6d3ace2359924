"""The figures a training ends with: the JSON and the table."""

from __future__ import annotations

import math
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from dynsparse.apps.common.outputs import bytes_text
from dynsparse.apps.common.training import Scores
from dynsparse.apps.pictures.training import Training
from dynsparse.nn import SparseLinear


def density(network: nn.Module) -> float:
    """Present weights / weights of the dense network; biases are not counted."""
    layers = _layers(network).values()
    return sum(_weight(layer).numel() for layer in layers) / sum(map(_positions, layers))


_Layer = nn.Linear | nn.Conv2d | SparseLinear


def _layers(network: nn.Module) -> dict[str, _Layer]:
    return {name: layer for name, layer in network.named_modules() if isinstance(layer, _Layer)}


def _weight(layer: _Layer) -> Tensor:
    return layer.values if isinstance(layer, SparseLinear) else layer.weight


def _shape(layer: _Layer) -> list[int]:
    """[out, in] of the matrix; in the rows of a convolution lies what its kernel sees."""
    if isinstance(layer, SparseLinear):
        return list(layer.pattern.shape)
    return [len(layer.weight), layer.weight[0].numel()]


def _positions(layer: _Layer) -> int:
    return math.prod(_shape(layer))


def memory(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, int]]:
    """Bytes of weights (biases too), pattern and optimizer state: as it is, and were it dense.

    The pattern is every index tensor the sparse layers hold; a dense network has none. The dense
    optimizer holds as many state entries per weight as this one does.
    """
    actual = {"weights": 0, "pattern": 0, "optimizer": 0}
    dense = dict(actual)
    sparse = [m for m in _layers(network).values() if isinstance(m, SparseLinear)]
    grown = {id(layer.values): _positions(layer) / layer.values.numel() for layer in sparse}
    for parameter in network.parameters():
        size = parameter.numel() * parameter.element_size()
        actual["weights"] += size
        factor = grown.get(id(parameter), 1.0)
        dense["weights"] += round(size * factor)
        for state in optimizer.state.get(parameter, {}).values():
            if isinstance(state, Tensor):
                size = state.numel() * state.element_size()
                actual["optimizer"] += size
                per_weight = state.numel() == parameter.numel()
                dense["optimizer"] += round(size * factor) if per_weight else size
    for layer in sparse:
        # The layer's index and the pattern may share memory: each storage counts once.
        tensors = [*layer.index, layer.pattern.cols]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        actual["pattern"] += sum(storages.values())
    return {"sparse": actual, "dense": dense}


def training_figures(
    training: Training, last: Scores | None, test: Scores | None
) -> dict[str, Any]:
    """What `--json` writes. Accuracies and densities are shares in [0, 1], times are seconds.

    `accuracy` and `loss` are of the test pictures, None with `--test-mode training`.
    """
    network = training.model
    layers = _layers(network)
    count = sum(parameter.numel() for parameter in network.parameters())
    held = sum(_weight(layer).numel() for layer in layers.values())
    return {
        "accuracy": None if test is None else test.accuracy,
        "loss": None if test is None else test.loss,
        "density": density(network),
        "epochs": training.epoch,
        "dataset": training.options.dataset,
        **training.figures(),
        "train_accuracy": None if last is None else last.accuracy,
        "train_loss": None if last is None else last.loss,
        "parameters": {
            "sparse": count,
            "dense": count - held + sum(map(_positions, layers.values())),
        },
        "memory": memory(network, training.optimizer),
        "layers": [
            {
                "name": name,
                "shape": _shape(layer),
                "sparse": isinstance(layer, SparseLinear),
                "block_size": layer.block_size if isinstance(layer, SparseLinear) else 1,
                "density": _weight(layer).numel() / _positions(layer),
                "weights": _weight(layer).numel(),
            }
            for name, layer in layers.items()
        ],
    }


def summary_table(figures: dict[str, Any]) -> Table:
    """The closing table: this network beside the same one dense."""
    table = Table(title=f"{figures['method']} on {figures['dataset']}", title_style="bold")
    table.add_column("")
    for heading in ("this network", "dense", "share"):
        table.add_column(heading, justify="right")

    def row(name: str, own: str, dense: str = "", share: float | None = None) -> None:
        table.add_row(name, own, dense, "" if share is None else f"{100 * share:.1f} %")

    if figures["accuracy"] is not None:
        row("test accuracy", f"{100 * figures['accuracy']:.2f} %")
        row("test loss", f"{figures['loss']:.4f}")
    sparse, dense = figures["parameters"]["sparse"], figures["parameters"]["dense"]
    row("parameters", f"{sparse:,}", f"{dense:,}", sparse / dense)
    own, whole = figures["memory"]["sparse"], figures["memory"]["dense"]
    for part in own:
        share = own[part] / whole[part] if whole[part] else None
        row(f"memory: {part}", bytes_text(own[part]), bytes_text(whole[part]), share)
    total, dense_total = sum(own.values()), sum(whole.values())
    row("memory: together", bytes_text(total), bytes_text(dense_total), total / dense_total)
    if figures["steps"]:
        row("training", f"{figures['seconds']:.1f} s")
        row("one step", f"{1000 * figures['seconds_per_step']:.3f} ms")
        row("pattern updates", f"{figures['updates']:,}")
        row("connections replaced", f"{figures['replaced']:,}")
        row("time in pattern updates", f"{100 * figures['update_share']:.1f} %")
    return table
