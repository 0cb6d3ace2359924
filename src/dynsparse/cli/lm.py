"""`dynsparse lm`: the flags; what they mean is in dynsparse.apps.lm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from dynsparse.apps import lm as app
from dynsparse.apps.lm import CHOICES, PRESETS, Options, preset
from dynsparse.cli.choices import describe_choice
from dynsparse.cli.values import arguments, integer, json_object, number

__all__ = ["lm"]

_DATA, _NETWORK, _SPARSITY, _TRAINING = "Data", "Network", "Sparsity", "Training"
_RATE, _SAMPLE, _RESUME, _OUTPUT = "Learning rate", "Text", "Checkpoints", "Output"
_DEFAULT = Options()


def _text(panel: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)


def _choice(panel: str, help: str, name: str) -> Any:
    return _text(panel, **describe_choice(help, CHOICES[name]))


def _int(panel: str, help: str, metavar: str = "<int>") -> Any:
    return _text(panel, help, parser=integer, metavar=metavar)


def _float(panel: str, help: str) -> Any:
    return _text(panel, help, parser=number, metavar="<float>")


def _path(panel: str, help: str, *names: str) -> Any:
    return _text(panel, help, *names)


# None is "left out": the preset's value, or the checkpoint's.
_Text: TypeAlias = str | None
_Int: TypeAlias = int | None
_Float: TypeAlias = float | None
_Path: TypeAlias = Path | None
_Flag: TypeAlias = bool | None


def lm(
    context: typer.Context,
    preset_name: Annotated[
        str,
        _text(
            _NETWORK,
            "Settings to start from; every flag below changes one of them. The defaults named here "
            "are those of tiny.",
            "--preset",
            metavar="|".join(PRESETS),
        ),
    ] = "tiny",
    data: Annotated[
        _Text,
        _text(
            _DATA,
            "A text file (UTF-8, plain or packed), a token file of `dynsparse encode`, or stdlib: "
            "the source text of Python's standard library. stdlib if left out.",
            metavar="FILE|stdlib",
        ),
    ] = None,
    valid_data: Annotated[
        _Path, _path(_DATA, "Validate on this text in place of a share of --data.")
    ] = None,
    test_data: Annotated[
        _Path, _path(_DATA, "Test on this text in place of a share of --data.")
    ] = None,
    valid_share: Annotated[
        _Float, _float(_DATA, "Share of --data to validate on, before the test's: 0.05.")
    ] = None,
    test_share: Annotated[
        _Float, _float(_DATA, "Share of --data, at its end, to test on: 0.05.")
    ] = None,
    tokens: Annotated[
        _Text, _choice(_DATA, "What a token is: char, or what a token file holds.", "tokens")
    ] = None,
    bpe_dir: Annotated[
        _Path,
        _path(_DATA, "Folder with GPT-2's vocab.bpe; without it the file is downloaded once."),
    ] = None,
    vocabulary_size: Annotated[
        _Int, _int(_DATA, "Use only the first merges of GPT-2's, for as many BPE tokens.")
    ] = None,
    layers: Annotated[_Int, _int(_NETWORK, f"Transformer layers: {_DEFAULT.layers}.")] = None,
    hidden_size: Annotated[
        _Int, _int(_NETWORK, f"Features of a token: {_DEFAULT.hidden_size}.")
    ] = None,
    ff_size: Annotated[
        _Int, _int(_NETWORK, f"Features inside the feed-forward part: {_DEFAULT.ff_size}.")
    ] = None,
    heads: Annotated[_Int, _int(_NETWORK, f"Attention heads: {_DEFAULT.heads}.")] = None,
    qkv_size: Annotated[
        _Int, _int(_NETWORK, "Features of one head; --hidden-size / --heads if left out.")
    ] = None,
    embedding_size: Annotated[
        _Int,
        _int(_NETWORK, "Width of the token table, with sparse projections up to the hidden size."),
    ] = None,
    sparse_embeddings: Annotated[
        _Flag, _text(_NETWORK, "Make the token table sparse too.", "--sparse-embeddings")
    ] = None,
    sequence_length: Annotated[
        _Int, _int(_NETWORK, f"Tokens the model sees at once: {_DEFAULT.sequence_length}.")
    ] = None,
    droprate: Annotated[
        _Float, _float(_NETWORK, f"Dropout, in training: {_DEFAULT.droprate}.")
    ] = None,
    initial_scale: Annotated[
        _Float,
        _float(
            _NETWORK,
            f"Times the usual size of first weights, 1/sqrt(inputs): {_DEFAULT.initial_scale}.",
        ),
    ] = None,
    data_type: Annotated[
        _Text,
        _choice(_NETWORK, "Of weights and products: float32; bfloat16 is autocast.", "data_type"),
    ] = None,
    method: Annotated[
        _Text,
        _choice(
            _SPARSITY, "How the pattern changes, or dense for the model without one.", "method"
        ),
    ] = None,
    match_parameters: Annotated[
        _Flag,
        _text(
            _SPARSITY,
            "With --method dense: as narrow as holds the sparse model's number of parameters.",
            "--match-parameters",
        ),
    ] = None,
    sparsity: Annotated[
        _Float, _float(_SPARSITY, f"Share of the weights left out: {_DEFAULT.sparsity}.")
    ] = None,
    block_size: Annotated[_Int, _int(_SPARSITY, "Edge of the blocks: 1.", "1|4|8|16|32")] = None,
    pooling_type: Annotated[
        _Text,
        _choice(
            _SPARSITY,
            "How the gradients of a block become its growth score, with rigl; NONE ranks as SUM.",
            "pooling_type",
        ),
    ] = None,
    prune_ratio: Annotated[
        _Float,
        _float(
            _SPARSITY,
            f"Largest share of a matrix that an update replaces: {_DEFAULT.prune_ratio}.",
        ),
    ] = None,
    prune_end: Annotated[
        _Float,
        _float(
            _SPARSITY, f"Share of the training after which patterns stay: {_DEFAULT.prune_end}."
        ),
    ] = None,
    update_interval: Annotated[
        _Int, _int(_SPARSITY, f"Steps between pattern updates: {_DEFAULT.update_interval}.")
    ] = None,
    cosine_prune_schedule: Annotated[
        _Text,
        _text(
            _SPARSITY,
            'JSON such as {"zero_steps": 5, "phase_delay": 0, "period": 0.5}: updates without '
            "replacements at first, radians, turns.",
            metavar="<json>",
        ),
    ] = None,
    steps: Annotated[_Int, _int(_TRAINING, f"Optimizer steps: {_DEFAULT.steps}.")] = None,
    batch_size: Annotated[
        _Int, _int(_TRAINING, f"Sequences per micro-batch: {_DEFAULT.batch_size}.")
    ] = None,
    gradient_accumulation_count: Annotated[
        _Int, _int(_TRAINING, "Micro-batches per optimizer step: 1.")
    ] = None,
    optimizer: Annotated[
        _Text, _choice(_TRAINING, "Adam (AdamW), or SGD without or with momentum.", "optimizer")
    ] = None,
    optimizer_arg: Annotated[
        list[str] | None,
        _text(
            _TRAINING, "An argument of the optimizer, such as beta2=0.99.", metavar="<name=json>"
        ),
    ] = None,
    grad_norm_clip: Annotated[
        _Float,
        _float(_TRAINING, "Largest norm of all gradients together, 0 for no limit: 1."),
    ] = None,
    repetition_weighting: Annotated[
        _Flag,
        _text(
            _TRAINING,
            "Train on every distinct token of a sequence alike, however often it is there.",
            "--repetition-weighting",
        ),
    ] = None,
    autoregression_offset: Annotated[
        _Int, _int(_TRAINING, "First tokens of a sequence that are not scored: 0.")
    ] = None,
    seed: Annotated[
        _Int, _int(_TRAINING, "Of all randomness; drawn and shown if left out.")
    ] = None,
    threads: Annotated[_Int, _int(_TRAINING, "CPU threads: 1.")] = None,
    valid_interval: Annotated[
        _Int, _int(_TRAINING, f"Steps between reports: {_DEFAULT.valid_interval}.")
    ] = None,
    evaluation_tokens: Annotated[
        _Int,
        _int(_TRAINING, "Evaluate on this many tokens at the begin of each part; all if left out."),
    ] = None,
    mode: Annotated[
        _Text, _choice(_TRAINING, "Train and test, only one, or only --sample.", "mode")
    ] = None,
    peak_learning_rate: Annotated[
        _Float, _float(_RATE, f"After the warm-up: {_DEFAULT.peak_learning_rate:g}.")
    ] = None,
    min_learning_rate: Annotated[
        _Float, _float(_RATE, f"After the decay: {_DEFAULT.min_learning_rate:g}.")
    ] = None,
    warmup_steps: Annotated[
        _Int, _int(_RATE, f"Steps up to the peak: {_DEFAULT.warmup_steps}.")
    ] = None,
    cooldown_steps: Annotated[
        _Int, _int(_RATE, "Steps of the decay; all that are left if left out.")
    ] = None,
    decay_power: Annotated[_Float, _float(_RATE, "1 decays in a straight line: 1.")] = None,
    sample: Annotated[_Int, _int(_SAMPLE, "Show this many tokens of text at the end.")] = None,
    prompt: Annotated[_Text, _text(_SAMPLE, "What the text goes on from; a line end.")] = None,
    temperature: Annotated[
        _Float, _float(_SAMPLE, f"0 takes the likeliest token: {_DEFAULT.temperature}.")
    ] = None,
    top_k: Annotated[_Int, _int(_SAMPLE, "Draw among this many of the likeliest only.")] = None,
    restore: Annotated[
        _Path,
        _path(
            _RESUME,
            "Continue from this checkpoint, or from the last in this folder. Flags left out are "
            "those it was trained with.",
        ),
    ] = None,
    checkpoint_path: Annotated[
        _Path, _path(_RESUME, "Folder for checkpoints; none are written without it.")
    ] = None,
    checkpoint_freq: Annotated[
        _Int, _int(_RESUME, f"Least steps between checkpoints: {_DEFAULT.checkpoint_freq}.")
    ] = None,
    stop_after: Annotated[
        _Int, _int(_RESUME, "Stop after this step of --steps, to continue with --restore.")
    ] = None,
    records_path: Annotated[
        _Path, _path(_OUTPUT, "Folder for the record that `dynsparse visualise` draws.")
    ] = None,
    json_file: Annotated[
        _Path, _path(_OUTPUT, "File for the final figures and the curves.", "--json")
    ] = None,
    tensorboard: Annotated[
        _Path, _path(_OUTPUT, "Folder for TensorBoard (needs tensorboard).")
    ] = None,
    use_wandb: Annotated[
        _Flag, _text(_OUTPUT, "Log to Weights & Biases (needs wandb).", "--use-wandb")
    ] = None,
    wandb_project_name: Annotated[_Text, _text(_OUTPUT, "Project at wandb.")] = None,
    wandb_name: Annotated[_Text, _text(_OUTPUT, "Name of the run at wandb.")] = None,
    wandb_tags: Annotated[list[str] | None, _text(_OUTPUT, "Tags at wandb.")] = None,
) -> None:
    """Train a sparse GPT-2-style language model on any text, and let it write."""
    values = dict(locals())
    del values["context"], values["preset_name"]
    values["json"] = values.pop("json_file")
    values = {name: value for name, value in values.items() if value not in (None, [])}
    given = set(values)
    if cosine_prune_schedule is not None:
        values["cosine_prune_schedule"] = json_object(
            "cosine-prune-schedule", cosine_prune_schedule
        )
    if optimizer_arg:
        values["optimizer_arg"] = arguments("optimizer-arg", optimizer_arg, "beta2=0.99")
    if wandb_tags:
        values["wandb_tags"] = tuple(wandb_tags)
    if grad_norm_clip == 0:
        values["grad_norm_clip"] = None
    if restore is not None:
        source = context.get_parameter_source("preset_name")
        if source is not None and source.name == "COMMANDLINE":
            raise ValueError(
                "--preset: the checkpoint of --restore says it all: leave --preset out"
            )
    app.run(preset(preset_name, **values), given=given)
