"""`dynsparse mnist`: the flags; what they mean is in dynsparse.apps.mnist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dynsparse.apps import mnist as app
from dynsparse.apps.mnist import CHOICES, Options
from dynsparse.cli.values import integer, number

__all__ = ["mnist"]

_DEFAULT = Options()
_DATA, _NETWORK, _SPARSITY = "Data", "Network", "Sparsity"
_TRAINING, _RESUME, _OUTPUT = "Training", "Checkpoints", "Output"


def _text(panel: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def _choice(panel: str, help: str, name: str) -> Any:
    return _text(panel, help, metavar="|".join(CHOICES[name]))


def _int(panel: str, help: str, metavar: str = "<int>", **more: Any) -> Any:
    return _text(panel, help, parser=integer, metavar=metavar, **more)


def _float(panel: str, help: str, **more: Any) -> Any:
    return _text(panel, help, parser=number, metavar="<float>", **more)


def mnist(
    context: typer.Context,
    dataset: Annotated[
        str, _choice(_DATA, "What to train on; digits needs no download.", "dataset")
    ] = _DEFAULT.dataset,
    data_dir: Annotated[
        Path | None,
        _text(
            _DATA,
            "Folder with the IDX files of mnist or fashion-mnist, plain or .gz; without it they "
            "are downloaded once.",
        ),
    ] = None,
    hold_out: Annotated[
        int,
        _int(_DATA, "Test on this many held-out training pictures, to choose settings honestly."),
    ] = _DEFAULT.hold_out,
    permute_input: Annotated[
        str,
        _choice(
            _DATA,
            "Order of the pixels; with block, a block of weights covers a tile of the picture.",
            "permute_input",
        ),
    ] = _DEFAULT.permute_input,
    densities: Annotated[
        list[float] | None,
        _float(
            _NETWORK, "Density of each layer, first to last; 1 is dense.", show_default="0.1 0.3"
        ),
    ] = None,
    hidden_size: Annotated[
        int | None, _int(_NETWORK, "Width of the one hidden layer.", show_default="320")
    ] = None,
    hidden_sizes: Annotated[
        list[int] | None, _int(_NETWORK, "Widths of several hidden layers, such as 300 100.")
    ] = None,
    block_size: Annotated[
        int, _int(_NETWORK, "Blocks of the first layer.", "1|4|8|16|32")
    ] = _DEFAULT.block_size,
    droprate: Annotated[
        float, _float(_NETWORK, "Dropout after every hidden layer.")
    ] = _DEFAULT.droprate,
    data_type: Annotated[
        str, _choice(_NETWORK, "Of weights and products; bfloat16 is autocast.", "data_type")
    ] = _DEFAULT.data_type,
    method: Annotated[
        str,
        _choice(
            _SPARSITY,
            "How the pattern changes: grown by gradient, at random, not at all; or every layer "
            "dense, whatever its density.",
            "method",
        ),
    ] = _DEFAULT.method,
    prune_ratio: Annotated[
        float,
        _float(_SPARSITY, "Largest share of a layer that an update replaces; it falls to 0."),
    ] = _DEFAULT.prune_ratio,
    pooling_type: Annotated[
        str,
        _choice(
            _SPARSITY,
            "How the gradients of a block become its growth score, with rigl; NONE ranks as SUM.",
            "pooling_type",
        ),
    ] = _DEFAULT.pooling_type,
    steps_per_epoch: Annotated[
        int, _int(_SPARSITY, "Pattern updates and reports per epoch.")
    ] = _DEFAULT.steps_per_epoch,
    update_interval: Annotated[
        int | None,
        _int(_SPARSITY, "Batches between pattern updates, in place of --steps-per-epoch."),
    ] = None,
    cosine_prune_schedule: Annotated[
        str,
        _text(
            _SPARSITY,
            'JSON such as {"zero_steps": 5, "phase_delay": 0, "period": 0.5}: updates without '
            "replacements at first, radians, turns.",
            metavar="<json>",
        ),
    ] = "{}",
    batch_size: Annotated[
        int, _int(_TRAINING, "Pictures per optimizer step.")
    ] = _DEFAULT.batch_size,
    epochs: Annotated[int, _int(_TRAINING, "Length of the training.")] = _DEFAULT.epochs,
    optimizer: Annotated[
        str, _choice(_TRAINING, "Adam, or SGD without or with momentum.", "optimizer")
    ] = _DEFAULT.optimizer,
    optimizer_arg: Annotated[
        list[str] | None,
        _text(
            _TRAINING,
            "An argument of the optimizer, such as momentum=0.9.",
            metavar="<name=json>",
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        _float(
            _TRAINING,
            "First learning rate; the default is for a batch of 16 and scales with the batch.",
            show_default="0.002 for Adam, 0.02 for the others",
        ),
    ] = None,
    decay: Annotated[
        str,
        _choice(_TRAINING, "Of the learning rate; steps are the original program's.", "decay"),
    ] = _DEFAULT.decay,
    seed: Annotated[
        int | None, _int(_TRAINING, "Of all randomness; drawn and shown if left out.")
    ] = None,
    threads: Annotated[
        int,
        _int(_TRAINING, "CPU threads; small batches gain nothing from more than one."),
    ] = _DEFAULT.threads,
    test_mode: Annotated[
        str, _choice(_TRAINING, "Train and test, or only one.", "test_mode")
    ] = _DEFAULT.test_mode,
    restore: Annotated[
        Path | None,
        _text(
            _RESUME,
            "Continue from this checkpoint, or from the newest in this folder. Flags left out are "
            "those it was trained with.",
        ),
    ] = None,
    checkpoint_path: Annotated[
        Path | None, _text(_RESUME, "Folder for checkpoints; none are written without it.")
    ] = None,
    checkpoint_freq: Annotated[
        int, _int(_RESUME, "Epochs between checkpoints.")
    ] = _DEFAULT.checkpoint_freq,
    stop_after: Annotated[
        int | None,
        _int(_RESUME, "Stop after this epoch of --epochs, to continue with --restore."),
    ] = None,
    records_path: Annotated[
        Path | None, _text(_OUTPUT, "Folder for the record that `dynsparse visualise` draws.")
    ] = None,
    json_file: Annotated[
        Path | None, _text(_OUTPUT, "File for the final figures.", "--json")
    ] = None,
    log: Annotated[Path | None, _text(_OUTPUT, "Text file for the training accuracy.")] = None,
    tensorboard: Annotated[
        Path | None, _text(_OUTPUT, "Folder for TensorBoard (needs tensorboard).")
    ] = None,
    use_wandb: Annotated[
        bool, _text(_OUTPUT, "Log to Weights & Biases (needs wandb).", "--use-wandb")
    ] = False,
    wandb_project_name: Annotated[str | None, _text(_OUTPUT, "Project at wandb.")] = None,
    wandb_name: Annotated[str | None, _text(_OUTPUT, "Name of the run at wandb.")] = None,
    wandb_tags: Annotated[list[str] | None, _text(_OUTPUT, "Tags at wandb.")] = None,
) -> None:
    """Train a small network with truly sparse layers on digits, MNIST or Fashion-MNIST."""
    values = dict(locals())
    del values["context"]
    given = {name for name in values if _is_given(context, name)}
    values["json"] = values.pop("json_file")
    values["hidden_sizes"] = _hidden_sizes(values.pop("hidden_size"), hidden_sizes)
    values["densities"] = tuple(densities) if densities else _DEFAULT.densities
    values["cosine_prune_schedule"] = _json_object("cosine-prune-schedule", cosine_prune_schedule)
    values["optimizer_arg"] = _arguments(optimizer_arg or [])
    values["wandb_tags"] = tuple(wandb_tags or ())
    if "hidden_size" in given:
        given.add("hidden_sizes")
    app.run(Options(**values), given=given)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _hidden_sizes(one: int | None, several: list[int] | None) -> tuple[int, ...]:
    if one is not None and several:
        raise ValueError("expected --hidden-size or --hidden-sizes, got both: leave one out")
    if one is not None:
        return (one,)
    return tuple(several) if several else tuple(_DEFAULT.hidden_sizes)


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(
            f'--{flag}: expected a JSON object such as {{"period": 0.5}}, got {text!r}'
        )
    return value


def _arguments(pairs: list[str]) -> dict[str, Any]:
    arguments = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        try:
            arguments[name] = json.loads(text)
        except json.JSONDecodeError:
            equals = ""
        if not equals or not name:
            raise ValueError(
                f"--optimizer-arg: expected name=json such as momentum=0.9, got {pair!r}"
            )
    return arguments
