"""The flags that trainings on pictures share, and the options they make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dynsparse.apps.pictures import CHOICES
from dynsparse.cli.choices import describe_choice
from dynsparse.cli.values import arguments, integer, json_object, number

DATA, NETWORK, SPARSITY = "Data", "Network", "Sparsity"
TRAINING, RESUME, OUTPUT = "Training", "Checkpoints", "Output"


def text(panel: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def choice(panel: str, help: str, values: tuple[Any, ...]) -> Any:
    return text(panel, **describe_choice(help, values))


def whole(panel: str, help: str, metavar: str = "<int>", **more: Any) -> Any:
    return text(panel, help, parser=integer, metavar=metavar, **more)


def real(panel: str, help: str, **more: Any) -> Any:
    return text(panel, help, parser=number, metavar="<float>", **more)


Dataset = Annotated[
    str, choice(DATA, "What to train on; digits needs no download.", CHOICES["dataset"])
]
DataDir = Annotated[
    Path | None,
    text(
        DATA,
        "Folder with the IDX files of mnist or fashion-mnist, plain or .gz; without it they "
        "are downloaded once.",
    ),
]
HoldOut = Annotated[
    int,
    whole(DATA, "Test on this many held-out training pictures, to choose settings honestly."),
]
DataType = Annotated[
    str, choice(NETWORK, "Of weights and products; bfloat16 is autocast.", CHOICES["data_type"])
]
Method = Annotated[
    str,
    choice(
        SPARSITY,
        "How the pattern changes (docs/algorithms.md): by gradient (rigl), at random (set), or as "
        "the other papers have it; gmp and granet begin denser and end at the densities asked for, "
        "topkast uses half of them in the forward pass; static never changes; dense makes every "
        "layer dense.",
        CHOICES["method"],
    ),
]
PruneRatio = Annotated[
    float,
    real(SPARSITY, "Largest share of a layer that an update replaces; it falls to 0."),
]
PoolingType = Annotated[
    str,
    choice(
        SPARSITY,
        "How the gradients of a block become its growth score, with rigl, snfs and granet; NONE "
        "ranks as SUM.",
        CHOICES["pooling_type"],
    ),
]
StepsPerEpoch = Annotated[int, whole(SPARSITY, "Pattern updates and reports per epoch.")]
UpdateInterval = Annotated[
    int | None,
    whole(SPARSITY, "Batches between pattern updates, in place of --steps-per-epoch."),
]
CosinePruneSchedule = Annotated[
    str,
    text(
        SPARSITY,
        'JSON such as {"zero_steps": 5, "phase_delay": 0, "period": 0.5}: updates without '
        "replacements at first, radians, turns.",
        metavar="<json>",
    ),
]
BatchSize = Annotated[int, whole(TRAINING, "Pictures per optimizer step.")]
Epochs = Annotated[int, whole(TRAINING, "Length of the training.")]
Optimizer = Annotated[
    str, choice(TRAINING, "Adam, or SGD without or with momentum.", CHOICES["optimizer"])
]
OptimizerArg = Annotated[
    list[str] | None,
    text(
        TRAINING,
        "An argument of the optimizer, such as momentum=0.9.",
        metavar="<name=json>",
    ),
]
LearningRate = Annotated[
    float | None,
    real(
        TRAINING,
        "First learning rate; the default is for a batch of 16 and scales with the batch.",
        show_default="by the optimizer",
    ),
]
Decay = Annotated[
    str,
    choice(TRAINING, "Of the learning rate; steps are the original program's.", CHOICES["decay"]),
]
Seed = Annotated[int | None, whole(TRAINING, "Of all randomness; drawn and shown if left out.")]
Threads = Annotated[
    int,
    whole(TRAINING, "CPU threads; small batches gain nothing from more than one."),
]
TestMode = Annotated[str, choice(TRAINING, "Train and test, or only one.", CHOICES["test_mode"])]
Restore = Annotated[
    Path | None,
    text(
        RESUME,
        "Continue from this checkpoint, or from the newest in this folder. Flags left out are "
        "those it was trained with.",
    ),
]
CheckpointPath = Annotated[
    Path | None, text(RESUME, "Folder for checkpoints; none are written without it.")
]
CheckpointFreq = Annotated[int, whole(RESUME, "Epochs between checkpoints.")]
StopAfter = Annotated[
    int | None,
    whole(RESUME, "Stop after this epoch of --epochs, to continue with --restore."),
]
RecordsPath = Annotated[
    Path | None, text(OUTPUT, "Folder for the record that `dynsparse visualise` draws.")
]
Json = Annotated[Path | None, text(OUTPUT, "File for the final figures.", "--json")]
Log = Annotated[Path | None, text(OUTPUT, "Text file for the training accuracy.")]
Tensorboard = Annotated[Path | None, text(OUTPUT, "Folder for TensorBoard (needs tensorboard).")]
UseWandb = Annotated[bool, text(OUTPUT, "Log to Weights & Biases (needs wandb).", "--use-wandb")]
WandbProjectName = Annotated[str | None, text(OUTPUT, "Project at wandb.")]
WandbName = Annotated[str | None, text(OUTPUT, "Name of the run at wandb.")]
WandbTags = Annotated[list[str] | None, text(OUTPUT, "Tags at wandb.")]


def options_of(context: typer.Context, values: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The options that the flags in `values` mean, and the names of those that were given."""
    options = {name: value for name, value in values.items() if name != "context"}
    given = {name for name in options if _is_given(context, name)}
    options["json"] = options.pop("json_file")
    options["cosine_prune_schedule"] = json_object(
        "cosine-prune-schedule", options["cosine_prune_schedule"]
    )
    options["optimizer_arg"] = arguments(
        "optimizer-arg", options["optimizer_arg"] or [], "momentum=0.9"
    )
    options["wandb_tags"] = tuple(options["wandb_tags"] or ())
    return options, given


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
