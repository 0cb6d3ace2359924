"""The figures a training ends with: the JSON and the table."""

from __future__ import annotations

from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from dynsparse.apps.common.outputs import bytes_text
from dynsparse.apps.common.training import Scores
from dynsparse.apps.pictures.training import Training
from dynsparse.nn import SparseLinear

__all__ = ["density", "memory", "summary_table", "training_figures"]


def density(network: nn.Module) -> float:
    """Present weights / weights of the dense network; biases are not counted."""
    present = sum(parameter.numel() for parameter in _weights(network))
    return present / _dense_weights(network)


def _layers(network: nn.Module) -> list[nn.Linear | SparseLinear]:
    return [m for m in network.modules() if isinstance(m, (nn.Linear, SparseLinear))]


def _weights(network: nn.Module) -> list[Tensor]:
    return [m.values if isinstance(m, SparseLinear) else m.weight for m in _layers(network)]


def _dense_weights(network: nn.Module) -> int:
    return sum(layer.in_features * layer.out_features for layer in _layers(network))


def memory(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, int]]:
    """Bytes of weights (biases too), pattern and optimizer state: as it is, and were it dense.

    The pattern is every index tensor the sparse layers hold; a dense network has none. The dense
    optimizer holds as many state entries per weight as this one does.
    """
    actual = {"weights": 0, "pattern": 0, "optimizer": 0}
    dense = dict(actual)
    grown = {
        id(layer.values): layer.in_features * layer.out_features / layer.values.numel()
        for layer in _layers(network)
        if isinstance(layer, SparseLinear)
    }
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
    for layer in _layers(network):
        if isinstance(layer, SparseLinear):
            # The layer's index and the pattern may share memory: each storage counts once.
            tensors = [*layer.index, layer.pattern.rows, layer.pattern.cols]
            storages = {
                t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors
            }
            actual["pattern"] += sum(storages.values())
    return {"sparse": actual, "dense": dense}


def training_figures(
    training: Training, last: Scores | None, test: Scores | None
) -> dict[str, Any]:
    """What `--json` writes. Accuracies and densities are shares in [0, 1], times are seconds.

    `accuracy` and `loss` are of the test pictures, None with `--test-mode training`.
    """
    network = training.model
    layers = []
    for name, module in network.named_modules():
        if isinstance(module, (nn.Linear, SparseLinear)):
            sparse = isinstance(module, SparseLinear)
            weight = module.values if isinstance(module, SparseLinear) else module.weight
            layers.append(
                {
                    "name": name,
                    "shape": [module.out_features, module.in_features],
                    "sparse": sparse,
                    "block_size": module.block_size if isinstance(module, SparseLinear) else 1,
                    "density": weight.numel() / (module.in_features * module.out_features),
                    "weights": weight.numel(),
                }
            )
    biases = sum(p.numel() for p in network.parameters()) - sum(
        w.numel() for w in _weights(network)
    )
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
            "sparse": sum(p.numel() for p in network.parameters()),
            "dense": _dense_weights(network) + biases,
        },
        "memory": memory(network, training.optimizer),
        "layers": layers,
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
