"""`dynsparse mnist-transformer`: the flags; dynsparse.apps.pictures.transformer does the rest."""

from __future__ import annotations

from typing import Annotated

import typer

from dynsparse.apps.pictures import transformer as app
from dynsparse.apps.pictures.transformer import Options
from dynsparse.cli import picture_flags as flags
from dynsparse.cli.picture_flags import NETWORK, real, text, whole

__all__ = ["mnist_transformer"]

_DEFAULT = Options()


def mnist_transformer(
    context: typer.Context,
    dataset: flags.Dataset = _DEFAULT.dataset,
    data_dir: flags.DataDir = None,
    hold_out: flags.HoldOut = _DEFAULT.hold_out,
    sparsity: Annotated[
        float, real(NETWORK, "Share of zeros in every matrix; 0 is dense.")
    ] = _DEFAULT.sparsity,
    block_size: Annotated[
        int, whole(NETWORK, "Blocks of every matrix.", "1|4|8|16|32")
    ] = _DEFAULT.block_size,
    encoder_layers: Annotated[
        int, whole(NETWORK, "Number of transformer layers.")
    ] = _DEFAULT.encoder_layers,
    hidden_length: Annotated[int, whole(NETWORK, "Features of a token.")] = _DEFAULT.hidden_length,
    ff_length: Annotated[
        int, whole(NETWORK, "Width of the feed-forward part.")
    ] = _DEFAULT.ff_length,
    attention_heads: Annotated[
        int, whole(NETWORK, "Heads of the attention.")
    ] = _DEFAULT.attention_heads,
    qkv_length: Annotated[
        int, whole(NETWORK, "Features of one head's queries, keys and values.")
    ] = _DEFAULT.qkv_length,
    dropout_keep_prob: Annotated[
        float, real(NETWORK, "Share that dropout keeps, in training; 1 for no dropout.")
    ] = _DEFAULT.dropout_keep_prob,
    exclude_attention_biases: Annotated[
        bool,
        text(NETWORK, "Attention without biases.", "--exclude-attention-biases"),
    ] = False,
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
    """Train a transformer with truly sparse projections on the rows of small pictures."""
    values, given = flags.options_of(context, locals())
    app.run(Options(**values), given=given)
