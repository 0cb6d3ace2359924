"""`dynsparse mnist`: the flags; what they mean is in dynsparse.apps.pictures.mnist."""

from __future__ import annotations

from typing import Annotated

import typer

from dynsparse.apps.pictures import mnist as app
from dynsparse.apps.pictures.mnist import CHOICES, Options
from dynsparse.cli import picture_flags as flags
from dynsparse.cli.picture_flags import DATA, NETWORK, choice, real, whole

__all__ = ["mnist"]

_DEFAULT = Options()


def mnist(
    context: typer.Context,
    dataset: flags.Dataset = _DEFAULT.dataset,
    data_dir: flags.DataDir = None,
    hold_out: flags.HoldOut = _DEFAULT.hold_out,
    permute_input: Annotated[
        str,
        choice(
            DATA,
            "Order of the pixels; with block, a block of weights covers a tile of the picture.",
            CHOICES["permute_input"],
        ),
    ] = _DEFAULT.permute_input,
    densities: Annotated[
        list[float] | None,
        real(NETWORK, "Density of each layer, first to last; 1 is dense.", show_default="0.1 0.3"),
    ] = None,
    hidden_size: Annotated[
        int | None, whole(NETWORK, "Width of the one hidden layer.", show_default="320")
    ] = None,
    hidden_sizes: Annotated[
        list[int] | None, whole(NETWORK, "Widths of several hidden layers, such as 300 100.")
    ] = None,
    block_size: Annotated[
        int, whole(NETWORK, "Blocks of the first layer.", "1|4|8|16|32")
    ] = _DEFAULT.block_size,
    droprate: Annotated[
        float, real(NETWORK, "Dropout after every hidden layer.")
    ] = _DEFAULT.droprate,
    data_type: flags.DataType = _DEFAULT.data_type,
    method: flags.Method = _DEFAULT.method,
    prune_ratio: flags.PruneRatio = _DEFAULT.prune_ratio,
    pooling_type: flags.PoolingType = _DEFAULT.pooling_type,
    steps_per_epoch: flags.StepsPerEpoch = _DEFAULT.steps_per_epoch,
    update_interval: flags.UpdateInterval = None,
    cosine_prune_schedule: flags.CosinePruneSchedule = "{}",
    batch_size: flags.BatchSize = _DEFAULT.batch_size,
    epochs: flags.Epochs = _DEFAULT.epochs,
    optimizer: flags.Optimizer = _DEFAULT.optimizer,
    optimizer_arg: flags.OptimizerArg = None,
    learning_rate: flags.LearningRate = None,
    decay: flags.Decay = _DEFAULT.decay,
    seed: flags.Seed = None,
    threads: flags.Threads = _DEFAULT.threads,
    test_mode: flags.TestMode = _DEFAULT.test_mode,
    restore: flags.Restore = None,
    checkpoint_path: flags.CheckpointPath = None,
    checkpoint_freq: flags.CheckpointFreq = _DEFAULT.checkpoint_freq,
    stop_after: flags.StopAfter = None,
    records_path: flags.RecordsPath = None,
    json_file: flags.Json = None,
    log: flags.Log = None,
    tensorboard: flags.Tensorboard = None,
    use_wandb: flags.UseWandb = False,
    wandb_project_name: flags.WandbProjectName = None,
    wandb_name: flags.WandbName = None,
    wandb_tags: flags.WandbTags = None,
) -> None:
    """Train a small network with truly sparse layers on digits, MNIST or Fashion-MNIST."""
    values, given = flags.options_of(context, locals())
    values["hidden_sizes"] = _hidden_sizes(values.pop("hidden_size"), hidden_sizes)
    values["densities"] = tuple(densities) if densities else _DEFAULT.densities
    if "hidden_size" in given:
        given.add("hidden_sizes")
    app.run(Options(**values), given=given)


def _hidden_sizes(one: int | None, several: list[int] | None) -> tuple[int, ...]:
    if one is not None and several:
        raise ValueError("expected --hidden-size or --hidden-sizes, got both: leave one out")
    if one is not None:
        return (one,)
    return tuple(several) if several else tuple(_DEFAULT.hidden_sizes)
