"""From options to figures: load, train, validate, test, sample, report."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dynsparse.apps.lm import resume
from dynsparse.apps.lm.corpus import Corpus, load_corpus
from dynsparse.apps.lm.display import Display
from dynsparse.apps.lm.loggers import Logger, open_loggers
from dynsparse.apps.lm.model import LanguageModel, build_model
from dynsparse.apps.lm.options import Options
from dynsparse.apps.lm.sample import sample
from dynsparse.apps.lm.sizes import check_memory, estimate_memory, matched, parameters
from dynsparse.apps.lm.summary import (
    closing_line,
    history_entry,
    memory_line,
    summary_table,
    training_figures,
)
from dynsparse.apps.lm.training import Scores, Training
from dynsparse.data.tokenizer import Tokenizer, tokenizer_from_state
from dynsparse.training.checkpoint import load_checkpoint
from dynsparse.training.records import Recorder

__all__ = ["run"]


def run(
    options: Options, console: Console | None = None, *, given: Collection[str] = ()
) -> dict[str, Any]:
    """Train, test and sample as `options` say; returns what `--json` writes.

    Args:
        options: what to do. With `restore`, options at their default become the checkpoint's.
        console: where progress goes; stdout if left out.
        given: options that hold even at their default: with `restore` they must agree.

    Returns:
        `training_figures`, with "sample" where text was sampled; that alone for `mode` "sample".

    Raises:
        ValueError: options or files that are wrong; one line.
        OSError: files that cannot be read or written.
        ModuleNotFoundError: a logger that is not installed.
    """
    console = Console() if console is None else console
    options.check()
    checkpoint = None if options.restore is None else resume.find_checkpoint(options.restore)
    seed = options.seed
    if checkpoint is not None:
        options, trained_with = resume.adopt(options, checkpoint, given)
        seed = trained_with if seed is None else seed
        options.check()
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
    _check_writable(options)
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        if options.mode == "sample":
            assert checkpoint is not None  # `check` saw to it
            figures = _sample_alone(options, seed, checkpoint, console)
        else:
            figures = _run(options, seed, checkpoint, console)
    finally:
        torch.set_num_threads(before)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def _run(options: Options, seed: int, checkpoint: Path | None, console: Console) -> dict[str, Any]:
    vocabulary = None if checkpoint is None else resume.saved_vocabulary(checkpoint)
    corpus = load_corpus(options, vocabulary)
    built = matched(options, corpus.size)
    for line in _headlines(built, corpus, seed):
        console.print(line, highlight=False)
    if options.mode in ("all", "train"):
        needed = estimate_memory(built, corpus.size)
        console.print(memory_line(needed), highlight=False)
        check_memory(needed)
    tokenizer = tokenizer_from_state(corpus.vocabulary, options.bpe_dir) if options.sample else None
    prompt = None if tokenizer is None else _prompt(tokenizer, options.prompt)

    training = Training(built, corpus, seed)
    if checkpoint is not None:
        resume.restore(training, checkpoint)
    valid = None
    loggers: list[Logger] = []
    if options.mode in ("all", "train"):
        loggers = open_loggers(options)
        valid = _train(training, options, console, loggers)
    valid = training.evaluate("valid") if valid is None else valid
    test = training.evaluate("test") if options.mode in ("all", "test") else None
    figures = training_figures(training, options, valid, test)
    for logger in loggers:
        logger.close(figures)
    console.print(summary_table(figures), highlight=False)
    console.print(closing_line(figures), highlight=False)
    if tokenizer is not None and prompt is not None:
        figures["sample"] = _sampled(training.model, options, tokenizer, prompt, seed, console)
    return figures


def _train(
    training: Training, options: Options, console: Console, loggers: list[Logger]
) -> Scores | None:
    """Train up to the last step wanted, and write what is asked for on the way.

    Returns the last scores of the validation part, None if no step was left.
    """
    last = options.stop_after or options.steps
    recorder = None
    if options.records_path is not None:
        recorder = _recorder(training, options, options.records_path)
    folder = options.checkpoint_path
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    saved, valid = training.step, None
    with Display(console, training.step, last) as display:
        for report in training.run(last):
            valid = report.valid
            entry = history_entry(report)
            training.history.append(entry)
            display.show(entry)
            for logger in loggers:
                logger.log(entry)
            if recorder is not None:
                recorder.log(report.step, {k: v for k, v in entry.items() if k != "step"})
            due = report.step - saved >= options.checkpoint_freq or report.step == last
            if folder is not None and due:
                resume.save(training, folder, options)
                saved = report.step
    return valid


def _recorder(training: Training, options: Options, path: Path) -> Recorder:
    if training.trainer is None:
        raise ValueError(
            "--records-path: expected a sparse layer to record, got dense layers alone: leave it "
            "out (--json has the curves of the loss), or choose another method"
        )
    metadata = {
        "app": resume.APP,
        "data": training.corpus.name,
        "method": options.method,
        "seed": training.seed,
        "steps": options.steps,
    }
    recorder = Recorder(path, metadata)
    if training.step:
        if not recorder.has_record:
            raise ValueError(
                f"--records-path: expected the record of the restored training, got {path} without "
                "one: name its folder, or leave --records-path out"
            )
        recorder.truncate(training.step)
    else:
        recorder.start({name: layer.pattern for name, layer in training.trainer.layers.items()})
    training.trainer.on_update.append(recorder.update)
    return recorder


def _sample_alone(
    options: Options, seed: int, checkpoint: Path, console: Console
) -> dict[str, Any]:
    """Text from a checkpoint; neither data nor optimizer are looked at."""
    vocabulary = resume.saved_vocabulary(checkpoint)
    tokenizer = tokenizer_from_state(vocabulary, options.bpe_dir)
    prompt = _prompt(tokenizer, options.prompt)
    built = matched(options, tokenizer.size)
    model = build_model(built, tokenizer.size, torch.Generator().manual_seed(seed))
    load_checkpoint(checkpoint, model=model, random_state=False)
    return {"sample": _sampled(model, options, tokenizer, prompt, seed, console)}


def _prompt(tokenizer: Tokenizer, text: str) -> torch.Tensor:
    try:
        return torch.from_numpy(tokenizer.encode(text).astype("i8"))
    except ValueError as error:
        raise ValueError(f"--prompt: {error}") from None


def _sampled(
    model: LanguageModel,
    options: Options,
    tokenizer: Tokenizer,
    prompt: torch.Tensor,
    seed: int,
    console: Console,
) -> str:
    generator = torch.Generator().manual_seed(seed)
    ids = sample(
        model,
        prompt,
        options.sample,
        generator,
        temperature=options.temperature,
        top_k=options.top_k,
        data_type=options.data_type,
    )
    text = tokenizer.decode(torch.cat([prompt, torch.tensor(list(ids))]).numpy())
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return text


def _headlines(options: Options, corpus: Corpus, seed: int) -> list[str]:
    count, _ = parameters(options, corpus.size)
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


def _check_writable(options: Options) -> None:
    file = options.json
    if file is None:
        return
    if file.is_dir() or not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise ValueError(f"--json: expected a file in a folder that can be written, got {file}")
