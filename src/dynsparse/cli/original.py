"""The flags of Graphcore's programs and their counterparts here.

Users of those programs come with their command lines: `translate` turns the old flags into ours, or
says in one line what there is instead. The same table makes docs/coming-from-popsparse.md.
"""

from __future__ import annotations

import re
from typing import NamedTuple

Answer = str | dict[str, str]
"""What becomes of an old flag: our arguments, such as "--epochs={}", where "{}" is its value,
"{1-}" one minus it and "{,}" the numbers in its braces; or, where that does not begin with "--",
why the flag is refused; empty for what is always so. A dict has an answer for each value; other
values are ours already."""


class Program(NamedTuple):
    """A program of Graphcore's.

    Attributes:
        command: ours in its place.
        same: the flags that mean the same here.
        changed: the others.
    """

    command: str
    same: tuple[str, ...]
    changed: dict[str, Answer]


_NO_DEVICE = "the machine is simulated, there is no device to attach to: leave it out"
_NO_COMPILER = "nothing is compiled ahead; `dynsparse matmul --plan-only` plans a product"
_NO_CACHE = "data is read into memory once, in any case: leave it out"
_NO_TOKENS = "there are no tokens, the rows of an image are its sequence: leave it out"
_ONE_VOCABULARY = "the vocabulary follows from --tokens and --vocabulary-size: leave it out"
_NO_DECODER = "the model has no decoder: leave it out"
_PIPELINE = (
    "one process has no stages; popsparse.compile has those of the machine, "
    "docs/many-processes.md those over processes"
)
_NO_OUTLINING = "nothing is outlined, there is no program memory to save: leave it out"
_LOG_LEVEL = "set the environment variable DYNSPARSE_LOG_LEVEL=INFO in its place"
_ON_MACHINE = "for layers on the machine: SparseLinear(..., target_options={...}) in Python"
_UPDATE = "for layers on the machine: popsparse.Update(...) in Python"
_FLOAT_SUMS = "sums are float32; `dynsparse matmul --partials-type` has both: leave it out"
_FLOAT_SLOTS: Answer = {
    "float32": "",
    "float16": "weights, gradients and optimizer state are float32: leave it out",
}
_IN_MEMORY = "everything stays in the host's memory: leave it out"
_HISTOGRAMS = "use --tensorboard FOLDER for curves and --records-path FOLDER for connectivity"
_ENGINE = "an option of engines: popsparse.machine.Engine(..., options={...}) in Python"
_REGROW: Answer = {"rigl": "--method=rigl", "random": "--method=set"}
_TYPES: Answer = {name: f"--data-type={name}" for name in ("float32", "float16")}

_WANDB = ("--use-wandb", "--wandb-project-name", "--wandb-tags", "--wandb-name")

# The flags that both transformers share.
_SHARED_SAME = (
    "--sparsity",
    "--block-size",
    "--prune-ratio",
    "--pooling-type",
    "--cosine-prune-schedule",
    "--batch-size",
    "--optimizer",
    "--optimizer-arg",
)
_SHARED: dict[str, Answer] = {
    "--regrow-type": _REGROW,
    "--sparse-matmul-options": _ON_MACHINE,
    "--dense-grad-matmul-options": _UPDATE,
    "--disable-updating": "--method=static",
    "--no-outline-sparse-layer": _NO_OUTLINING,
    "--dtype": _TYPES,
    "--random-seed": "--seed={}",
    "--num-shards": _PIPELINE,
    "--decoder-layers": _NO_DECODER,
    "--target-sequence-length": _NO_DECODER,
    "--target-vocab-length": "the targets are those of the data: leave it out",
    "--target-bos-id": _NO_DECODER,
    "--target-pad-id": _NO_DECODER,
    "--target-eos-id": _NO_DECODER,
    "--include-projection-bias": "the last layer is as it is in the model: leave it out",
    "--config-file": "give the flags themselves; --restore takes those of a checkpoint",
    "--disable-concat-qkv": "queries, keys and values are one matrix: leave it out",
    "--use-static-sparse-autoregressive-attention": (
        "use nn.SparseMultiheadAttention(attention_pattern=...) in a model of your own"
    ),
    "--outline-encoder": _NO_OUTLINING,
    "--no-outline-dropout": _NO_OUTLINING,
    "--encoder-stage-dense-matmul-options": _ON_MACHINE,
    "--projection-stage-dense-matmul-options": _ON_MACHINE,
    "--train-checkpoint-path": "--checkpoint-path={}",
}

# The flags of both programs for one product.
_PRODUCT: dict[str, Answer] = {
    "--batch-size": "--batch={}",
    "--input-size": "--cols={}",
    "--output-size": "--rows={}",
    "--data-type": {
        **dict.fromkeys(("fp32", "float"), "--dtype=float32"),
        **dict.fromkeys(("fp16", "half"), "--dtype=float16"),
    },
}

PROGRAMS = {
    "sparse_mnist.py": Program(
        "mnist",
        (
            *("--test-mode", "--densities", "--droprate", "--log", "--seed", "--checkpoint-path"),
            *("--checkpoint-freq", "--batch-size", "--steps-per-epoch", "--epochs"),
            *("--prune-ratio", "--records-path", "--optimizer", "--optimizer-arg", "--restore"),
            *("--block-size", "--pooling-type", "--permute-input", "--hidden-size"),
            *("--cosine-prune-schedule", *_WANDB),
        ),
        {
            "--gradient-accumulation-count": (
                "a step takes the whole --batch-size at once: leave it out"
            ),
            "--pipelining": _PIPELINE,
            "--pipeline-schedule": _PIPELINE,
            "--log-level": _LOG_LEVEL,
            "--disable-pruning": "--method=static",
            "--regrow": _REGROW,
            "--start-epoch": "a run with --restore goes on where its checkpoint ends: leave it out",
            "--data-type": {"fp32": "--data-type=float32", "fp16": "--data-type=float16"},
            "--partials-type": {"fp32": "", "fp16": _FLOAT_SUMS},
            "--disable-shared-buckets": _ON_MACHINE,
            "--train-device-iterations": "use --steps-per-epoch N or --update-interval N",
            "--disable-dense-grad-override": "use --method static, which has no dense gradient",
            "--single-train-step-only": "use --stop-after 1, the shortest run is an epoch",
            "--on-demand": _NO_DEVICE,
        },
    ),
    "sparse_transformer_rigl_mnist.py": Program(
        "mnist-transformer",
        (
            *_SHARED_SAME,
            *("--steps-per-epoch", "--encoder-layers", "--attention-heads", "--hidden-length"),
            *("--qkv-length", "--ff-length", "--dropout-keep-prob", "--exclude-attention-biases"),
        ),
        _SHARED
        | {
            "--mode": {
                "train": "--test-mode=training",
                "test": "--test-mode=tests",
                "all": "--test-mode=all",
            },
            "--nepochs": "--epochs={}",
            "--embedding-length": _NO_TOKENS,
            "--source-sequence-length": _NO_TOKENS,
            "--source-vocab-length": _NO_TOKENS,
            "--source-pad-id": _NO_TOKENS,
            "--exclude-embedding": _NO_TOKENS,
        },
    ),
    "train_sparse.py": Program(
        "lm",
        (
            *_SHARED_SAME,
            *("--mode", "--autoregression-offset", "--sparse-embeddings", "--grad-norm-clip"),
            *("--warmup-steps", "--cooldown-steps", "--peak-learning-rate"),
            *("--min-learning-rate", "--decay-power", "--gradient-accumulation-count"),
            *("--loss-scale", *_WANDB),
        ),
        _SHARED
        | {
            "--extra-poplar-options-disable": _ENGINE,
            "--extra-poplar-options-sync-enable": _ENGINE,
            "--extra-poplar-options-num-callback-threads": _ENGINE,
            "--nepochs": "use --steps N, which counts optimizer steps",
            "--repeat-count": "--update-interval={}",
            "--recompute": "activations are kept: use a smaller --batch-size",
            "--restore-epoch": "use --restore with the checkpoint's file or its folder",
            "--unscale-grad-pre-acc": "",  # in float32, where the order makes no difference
            "--grad-acculation-mode": {
                "Avg": "",
                "Sum": "gradients of micro-batches are averaged: leave it out",
            },
            "--scale-grad-pre-acc": "",  # the loss of a micro-batch is divided by their number
            "--slots-fp-type": _FLOAT_SLOTS,
            "--force-fp32-weight-update": "",
            "--pipeline": _PIPELINE,
            "--gradient-accumulation-dtype": _FLOAT_SLOTS,
            "--offload-activations": _IN_MEMORY,
            "--offload-gradient-accumulation-buffers": _IN_MEMORY,
            "--offload-weight-update-variables": _IN_MEMORY,
            "--use-synthetic-data": "--synthetic-data",
            "--shuffle": "sequences are drawn at random in any case: leave it out",
            "--disable-dataset-cache": _NO_CACHE,
            "--disable-dataset-prefetch": _NO_CACHE,
            "--data-dir": "use --data with a text file or one that `dynsparse encode` wrote",
            "--log-level": _LOG_LEVEL,
            "--decode": "use --sample N to see text",
            "--log-histograms": _HISTOGRAMS,
            "--bins-count": _HISTOGRAMS,
            "--debug-dense-grad": _HISTOGRAMS,
            "--compile-only": _NO_COMPILER,
            "--compile-only-ipu-version": _NO_COMPILER,
            "--on-demand": _NO_DEVICE,
            "--encoder-layers": "--layers={}",
            "--attention-heads": "--heads={}",
            "--hidden-length": "--hidden-size={}",
            "--qkv-length": "--qkv-size={}",
            "--ff-length": "--ff-size={}",
            "--embedding-length": "--embedding-size={}",
            "--source-sequence-length": "--sequence-length={}",
            "--source-vocab-length": "--vocabulary-size={}",
            "--source-pad-id": _ONE_VOCABULARY,
            "--exclude-embedding": "the model reads tokens: leave it out",
            "--dropout-keep-prob": "--droprate={1-}",
            "--exclude-attention-biases": "every matrix has its bias: leave it out",
        },
    ),
    "sparse_matmul.py": Program(
        "matmul",
        ("--density", "--block-size"),
        _PRODUCT
        | {
            "--pattern": {
                "random": "",
                "fixed": "patterns are drawn from --seed: leave it out",
                "random_sign_ones": "values follow from --seed: leave it out",
                "random_orthogonal": "patterns are drawn from --seed: leave it out",
            },
            "--meta-info-oversize": "--oversize={}",
            "--pooling-type": {
                name: f"--update={name.lower()}" for name in ("NONE", "SUM", "AVG", "MAX")
            },
        },
    ),
    "sparse_fc_layer": Program(
        "matmul",
        (
            *("--help", "--block-size", "--ignore-data", "--plan-only", "--plan-constraints"),
            *("--weighted-area-weighting", "--profile"),
        ),
        _PRODUCT
        | {
            "--compile-only": "--plan-only",
            "--device-type": {
                **dict.fromkeys(("IpuModel2", "Sim2"), "--target=mk2"),
                **dict.fromkeys(("IpuModel21", "Sim21"), "--target=bow"),
                "Cpu": "the machine is simulated: --target mk2 or bow",
                "Hw": "the machine is simulated: --target mk2 or bow",
            },
            "--sparsity-factor": "--density={}",
            "--partials-type": {
                "half": "--partials-type=float16",
                "float": "--partials-type=float32",
            },
            "--tiles-per-ipu": "--tiles={}",
            "--single-phase": {
                "all": "--passes=forward,grad_input,grad_weight",
                "fwd": "--passes=forward",
                "bwd": "--passes=grad_input",
                "wu": "--passes=grad_weight",
            },
            "--profile-dir": "use --profile FILE.json and `dynsparse report`",
            "--report-plan": {"true": "--report-plan", "false": ""},
            "--report-total-cycle-counts": "",
            "--variable-seed": "use --seed N with a number of your own",
            "--weighted-area-begin": "--weighted-area-begin {,}",
            "--weighted-area-end": "--weighted-area-end {,}",
            "--matmul-options": "--options={}",
            "--report-dense-gradw-serial-splits": {
                "true": "use popsparse.fully_connected_dense_grad_w_serial_splits in Python",
                "false": "",
            },
        },
    ),
    "visualise_connectivity.py": Program(
        "visualise", ("--cmap", "--records-path", "--animate"), {}
    ),
}

_NUMBERS = re.compile(r"\{\s*\d+(\s*,\s*\d+)*\s*\}")


def translate(command: str, arguments: list[str]) -> list[str]:
    """The arguments of a command with our flags in place of the original program's.

    Raises:
        ValueError: a flag that has no counterpart here, with what there is instead.
    """
    table: dict[str, Answer] = {}
    for program in PROGRAMS.values():
        table |= program.changed if program.command == command else {}
    result: list[str] = []
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        name, equals, value = argument.partition("=")
        at += 1
        answer = table.get(name)
        takes_value = isinstance(answer, dict) or (answer is not None and "{" in answer)
        if takes_value and not equals:
            value = arguments[at] if at < len(arguments) else ""
        if isinstance(answer, dict):
            answer = answer.get(value)
        elif answer is not None and "{,}" in answer and not _NUMBERS.fullmatch(value):
            answer = None
        if answer is None:
            result.append(argument)
            continue
        if answer and not answer.startswith("--"):
            raise ValueError(f"{name}{f' {value}' if takes_value else ''}: {answer}")
        at += takes_value and not equals
        result += _fill(name, answer, value)
    return result


def _fill(name: str, answer: str, value: str) -> list[str]:
    if "{1-}" in answer:
        try:
            value = f"{1 - float(value):.12g}"
        except ValueError:
            raise ValueError(f"{name}: expected a number, got {value!r}") from None
        answer = answer.replace("{1-}", "{}")
    if "{,}" in answer:
        return [answer.split()[0], *re.findall(r"\d+", value)]
    return [answer.replace("{}", value)] if answer else []
