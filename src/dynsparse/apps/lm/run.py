"""From options to figures: load, train, validate, test, sample, report."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dynsparse._core.processor import available_memory
from dynsparse.apps.common.resume import Checkpoint, restore, save
from dynsparse.apps.common.run import (
    Display,
    Names,
    Outputs,
    format_bytes,
    machine_tables,
    open_loggers,
    run_application,
    stop_on_interrupt,
)
from dynsparse.apps.common.training import NOTICE, Scores
from dynsparse.apps.lm.corpus import Corpus, empty_corpus, load_corpus
from dynsparse.apps.lm.model import (
    check_memory,
    count_parameters,
    match_parameters_of,
    sample,
    state_bytes,
)
from dynsparse.apps.lm.options import Options
from dynsparse.apps.lm.training import Training
from dynsparse.data.text import Tokenizer, encode_text, tokenizer_from_state
from dynsparse.nn import SparseLinear
from dynsparse.tracing import span, spanned


def training_figures(
    training: Training, valid: Scores | None, test: Scores | None
) -> dict[str, Any]:
    """The figures that `--json` writes.

    Losses are nats per token. `accuracy` and `loss` are of the test part, None where it was not
    evaluated.
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
    """A table of the scores on the validation and test parts."""
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
            f"pattern updates: {figures['updates']} ({figures['replaced']:,} connections, "
            f"{100 * figures['update_share']:.1f} % of the time)"
        )
    return text


_COLUMNS = {
    "step": 9, "loss": 9, "valid": 9, "perplexity": 12, "accuracy": 10, "replaced": 11,
    "tokens/s": 10,
}  # fmt: skip
_NAMES = Names(tested=("loss", "perplexity", "accuracy"), project="dynsparse-language-model")


def run(
    options: Options, console: Console | None = None, *, given: Collection[str] = ()
) -> dict[str, Any]:
    """Train, test and sample as `options` say.

    Args:
        options, console, given: see `run_application`, also for what is raised.

    Returns:
        `training_figures`, with "sample" where text was sampled; that alone for `mode` "sample".
    """
    return run_application(Training, options, _run, console, given)


def _run(
    options: Options, seed: int, checkpoint: Checkpoint | None, console: Console
) -> dict[str, Any]:
    vocabulary = {} if checkpoint is None else checkpoint["vocabulary"]
    writes_alone = options.mode == "sample"
    with span("data"):
        corpus = (
            empty_corpus(vocabulary) if writes_alone else load_corpus(options, vocabulary or None)
        )
    if not writes_alone:
        _introduce(options, corpus, seed, console)
    tokenizer = tokenizer_from_state(corpus.vocabulary, options.bpe_dir) if options.sample else None
    prompt = None
    if tokenizer is not None:
        ids = encode_text(tokenizer, options.prompt, "--prompt")
        prompt = torch.from_numpy(ids.astype("i8"))

    with span("build"):
        training = Training(options, corpus, seed)
    if checkpoint is not None:
        restore(training, checkpoint)
    figures = {} if writes_alone else _train_and_test(training, console)
    if tokenizer is not None and prompt is not None:
        figures["sample"] = _sample(training, tokenizer, prompt, console)
    return figures


@spanned("report")
def _introduce(options: Options, corpus: Corpus, seed: int, console: Console) -> None:
    """Say what will be done, and refuse what cannot be, before anything is made."""
    corpus.check_length(options.sequence_length)
    built = match_parameters_of(options, corpus.size)
    if options.synthetic_data:
        console.print(NOTICE.format(device=options.device), highlight=False)
    for line in _headlines(built, corpus, seed):
        console.print(line, highlight=False)
    if options.trains:
        needed = state_bytes(built, corpus.size)
        console.print(
            f"memory: about {format_bytes(needed)} of weights, gradients, optimizer state and "
            "patterns, without activations",
            highlight=False,
        )
        device = torch.device(options.device)
        on_cpu = device.type == "cpu"
        check_memory(needed, available_memory() if on_cpu else torch.cuda.mem_get_info(device)[0])


def _train_and_test(training: Training, console: Console) -> dict[str, Any]:
    options = training.options
    valid = None
    loggers = partial(open_loggers, options, _NAMES)
    with Outputs(training, loggers) if options.trains else nullcontext() as outputs:
        if outputs is not None:
            with stop_on_interrupt(training, console):
                valid = _train(training, console, outputs)
        valid = training.evaluate("valid") if valid is None else valid
        test = training.evaluate("test") if options.mode in ("all", "test") else None
        figures = training_figures(training, valid, test)
        if outputs is not None:
            outputs.close(figures)
    console.print(summary_table(figures), highlight=False)
    console.print(closing_line(figures), highlight=False)
    for table in machine_tables(figures):
        console.print(table, highlight=False)
    return figures


def _train(training: Training, console: Console, outputs: Outputs) -> Scores | None:
    """Train up to the last step wanted, and write what is asked for on the way.

    Returns the last scores of the validation part, None if no step was left.
    """
    options = training.options
    last = options.stop_after or options.steps
    saved, valid = training.step, None
    with Display(console, _COLUMNS, last, training.step) as display:
        for entry in training.run(last):
            step = entry["step"]
            valid = Scores(entry["valid_loss"], entry["valid_accuracy"])
            with span("report"):
                display.show(step, f"{step:,}/{last:,}", display.format_row(*_cells(entry)))
                outputs.log(step, {name: value for name, value in entry.items() if name != "step"})
            due = step - saved >= options.checkpoint_freq or step == last
            if options.checkpoint_path is not None and due:
                save(training, options.checkpoint_path)
                saved = step
    return valid


def _cells(entry: dict[str, Any]) -> list[str]:
    return [
        f"{entry['step']:,}",
        f"{entry['loss']:.4f}",
        f"{entry['valid_loss']:.4f}",
        f"{entry['valid_perplexity']:.3f}",
        f"{100 * entry['valid_accuracy']:.2f} %",
        f"{entry['replaced']:,}",
        f"{entry['tokens_per_second']:,.0f}",
    ]


@spanned("sample")
def _sample(
    training: Training, tokenizer: Tokenizer, prompt: torch.Tensor, console: Console
) -> str:
    options = training.options
    ids = sample(
        training.model,
        prompt,
        options.sample,
        torch.Generator().manual_seed(training.seed),
        temperature=options.temperature,
        top_k=options.top_k,
        data_type=options.data_type,
    )
    text = tokenizer.decode(torch.cat([prompt, torch.tensor(list(ids))]).numpy())
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return text


def _headlines(options: Options, corpus: Corpus, seed: int) -> list[str]:
    count, _ = count_parameters(options, corpus.size)
    kind = corpus.vocabulary["kind"]
    sparse = (
        "dense"
        if options.method == "dense"
        else f"{100 * options.sparsity:g} % sparse, blocks of {options.block_size}"
    )
    return [
        f"{options.method} on {corpus.name}: {len(corpus.train):,} tokens to train, "
        f"{len(corpus.valid):,} to validate, {len(corpus.test):,} to test, {corpus.size:,} {kind} "
        "tokens in the vocabulary",
        f"{options.layers} layers of {options.hidden_size} and {options.ff_size}, {options.heads} "
        f"heads, sequences of {options.sequence_length}, {sparse}: {count:,} parameters; "
        f"seed {seed}",
    ]
