"""The frame of every run: options, checkpoint, seed, threads, and the JSON at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from rich.console import Console

from dynsparse.apps.common.launched import launched
from dynsparse.apps.common.options import TrainingOptions
from dynsparse.apps.common.resume import Checkpoint, adopt, find_checkpoint
from dynsparse.apps.common.training import Training
from dynsparse.files.atomic_write import atomic_write_text
from dynsparse.options import check_applies
from dynsparse.ranks import collective_errors
from dynsparse.tracing import trace

_Options = TypeVar("_Options", bound=TrainingOptions)


def run_with(
    kind: type[Training],
    options: _Options,
    body: Callable[[_Options, int, Checkpoint | None, Console], dict[str, Any]],
    console: Console | None = None,
    given: Collection[str] = (),
) -> dict[str, Any]:
    """Do what `options` say; returns the figures of `body`, which is what `--json` writes.

    Started by torchrun in several processes, these train together: each takes its share of every
    batch, and the first shows and writes what there is to show and write.

    Args:
        kind: whose checkpoints to look for.
        options: what to do. With `restore`, options at their default become the checkpoint's.
        body: called with the whole options, the seed, the checkpoint to start from, and where
            progress goes.
        console: where progress goes; stdout if left out.
        given: options that were asked for, even at their default: with `restore` they must agree,
            and they must apply to the others.

    Raises:
        ValueError: options or files that are wrong; one line.
        OSError: files that cannot be read or written.
        ModuleNotFoundError: a logger that is not installed.
    """
    with launched(options.device) as ranks:
        checkpoint = None
        with collective_errors(ranks):
            options.check()
            if options.restore is not None:
                checkpoint = Checkpoint.read(kind.app, find_checkpoint(kind, options.restore))
                options = adopt(options, checkpoint, given)
                options.check()
            check_applies(options, given)
        seed = int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed
        seed = int(ranks.broadcast(torch.tensor([seed], device=ranks.device)))
        if ranks.rank:
            console = Console(quiet=True)  # the first rank speaks for all
        before = torch.get_num_threads()
        torch.set_num_threads(options.threads)
        try:
            with nullcontext() if options.trace is None else trace(options.trace):
                figures = body(options, seed, checkpoint, Console() if console is None else console)
        finally:
            torch.set_num_threads(before)
        if options.json is not None and ranks.rank == 0:
            atomic_write_text(options.json, json.dumps(figures, indent=2) + "\n")
        return figures
