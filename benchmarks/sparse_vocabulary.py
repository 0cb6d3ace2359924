"""Training steps of GPT-2 small with a sparse vocabulary, beside a dense one and masked layers.

    python benchmarks/sparse_vocabulary.py [--densities 0.1 0.2] [--batches 1 2] [--memory]

The whole model of the package transformers with random weights: forward, loss, backward, AdamW
(fused). The matrices of the blocks are sparse; with a "sparse vocabulary" so are the embedding and
the head tied to it, with `linear_cross_entropy`. Times are CPU seconds of one thread, so other
processes affect them little; the contenders take turns. --memory measures the peak instead, each
contender in its own process. Prints a line of JSON per case.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from memory import resident
from models import _LEAN, _transformers
from torch import nn

import dynsparse as ds
from dynsparse.bench.contenders import mask_layers

CONTENDERS = ("sparse vocabulary", "sparse", "masked", "dense")
VOCABULARY = ["transformer.wte", "lm_head"]


@dataclass(frozen=True)
class Case:
    density: float
    batch: int
    tokens: int
    lean: bool  # no dropout, and torch's operator for the activation


def build(case: Case, contender: str) -> nn.Module:
    library = _transformers()
    torch.manual_seed(0)
    config = library.GPT2Config(**(_LEAN if case.lean else {"use_cache": False}))
    model: nn.Module = library.GPT2LMHeadModel(config).train()
    if contender == "dense":
        return model
    ds.sparsify(model, case.density, allocation="uniform", verbose=False)
    if contender == "sparse vocabulary":
        ds.sparsify(model, case.density, include=VOCABULARY, verbose=False)
    return mask_layers(model) if contender == "masked" else model


def training_step(case: Case, model: Any) -> Callable[[], float]:
    generator = torch.Generator().manual_seed(0)
    shape = case.batch, case.tokens + 1
    ids = torch.randint(model.config.vocab_size, shape, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    is_sparse = isinstance(model.lm_head, ds.nn.TiedHead)

    def step() -> float:
        """Returns the loss."""
        optimizer.zero_grad()
        hidden = model.transformer(ids[:, :-1]).last_hidden_state
        if is_sparse:
            loss = ds.nn.linear_cross_entropy(hidden, model.lm_head, ids[:, 1:])
        else:
            loss = F.cross_entropy(model.lm_head(hidden).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def measure_times(case: Case, rounds: int) -> dict[str, Any]:
    """Median, smallest and largest CPU milliseconds; and of the ratios to "sparse" and "sparse
    vocabulary" in each round."""
    steps = {who: training_step(case, build(case, who)) for who in CONTENDERS}
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {who: [] for who in CONTENDERS}
    for _ in range(rounds):
        for who, step in steps.items():
            began = time.process_time()
            step()
            times[who].append(1000 * (time.process_time() - began))
    found: dict[str, Any] = {who: spread(taken) for who, taken in times.items()}
    for ours in CONTENDERS[:2]:
        for other in CONTENDERS[2:]:
            pairs = zip(times[other], times[ours], strict=True)
            found[f"{other} / {ours}"] = spread([a / b for a, b in pairs])
    return found


def spread(figures: list[float]) -> list[float]:
    found = statistics.median(figures), min(figures), max(figures)
    return [round(figure, 2 if found[0] < 100 else 0) for figure in found]


def measure_peak(case: Case, contender: str) -> int:
    """Bytes by which the resident memory of two steps exceeds that after the imports."""
    torch.set_num_threads(1)
    _transformers()
    before = resident("VmRSS")
    model = build(case, contender)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak: the model is built dense first
    step = training_step(case, model)
    for _ in range(2):
        step()
    return resident("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.1, 0.2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--lean", action="store_true", help="no dropout, and torch's GELU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead of time")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for batch in options.batches:
        for density in options.densities:
            case = Case(density, batch, options.tokens, options.lean)
            if options.contender is not None:
                print(measure_peak(case, options.contender))
                continue
            if options.memory:
                words = [sys.executable, __file__, "--densities", str(density), "--batches",
                         str(batch), "--tokens", str(options.tokens), "--contender"]  # fmt: skip
                words[2:2] = ["--lean"] if options.lean else []
                found: dict[str, Any] = {
                    who: int(subprocess.check_output([*words, who]).split()[-1])
                    for who in CONTENDERS
                }
            else:
                found = measure_times(case, options.rounds)
            print(json.dumps({**vars(case), **found}), flush=True)


if __name__ == "__main__":
    main()
