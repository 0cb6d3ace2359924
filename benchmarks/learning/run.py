"""Why RigL does not win on the language model: one training per variant and seed.

    python benchmarks/learning/run.py --data input.txt --variants rigl "rigl, 16 batches" \
        --seeds 0 1 2 3 4 --output results.jsonl

Prints a line of JSON per training. The variants are in variants.py, their parts in pieces.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from masked_rigl import MaskedRigL
from pieces import (
    CorrelationGrowth,
    LateCosine,
    NoisyGrowth,
    Protected,
    SomeLayers,
    Watch,
    fill_second_moment,
)
from torch import nn
from variants import Variant, variant

import dynsparse as ds
from dynsparse import training
from dynsparse.allocation import allocate
from dynsparse.apps.common.training import Sums, replace_sparse
from dynsparse.apps.lm.corpus import Corpus, load_corpus
from dynsparse.apps.lm.model import scale_matrices
from dynsparse.apps.lm.options import Options
from dynsparse.apps.lm.training import Training
from dynsparse.bench.contenders import MaskedLinear

NOISE_AT = (0.05, 0.2, 0.4, 0.6)  # shares of the training


class Study(Training):
    """The training of `dynsparse lm`, with the variant's trainer."""

    def __init__(self, options: Options, corpus: Corpus, seed: int, chosen: Variant) -> None:
        self.chosen = chosen
        super().__init__(options, corpus, seed)
        schedule = LateCosine(
            options.steps,
            round(chosen.interval * options.steps / 20),
            chosen.share,
            chosen.end,
            first=round(chosen.first * options.steps),
        )
        # For batches that only growth uses: all variants train on the same batches.
        self.others = torch.Generator().manual_seed(seed + 1_000_000)
        self.watch: Watch | None = None
        if chosen.masked:
            self.masked = MaskedRigL(self.model, self.optimizer, schedule)
        elif chosen.growth is not None:
            self.trainer = self._trainer(schedule)

    def _trainer(self, schedule: LateCosine) -> training.SparseTrainer:
        chosen = self.chosen
        growth: training.Growth = {
            "gradient": training.GradientGrowth,
            "correlation": CorrelationGrowth,
            "random": lambda: training.RandomGrowth(self.seed),
        }[chosen.growth]()
        made = training.SparseTrainer(
            self.model,
            self.optimizer,
            schedule=schedule,
            growth=NoisyGrowth() if chosen.noise else growth,
            regrow_dropped=chosen.regrow,
            initial_value=training.GradientStep(chosen.initial_step) if chosen.initial_step else 0,
            budget=SomeLayers(chosen.only),
            history=training.WindowMomentum(0.99, chosen.window) if chosen.window > 1 else None,
        )
        self.watch = Watch(made)
        if chosen.protect:
            made.drop_score = Protected(self.watch)
        if chosen.second_moment == "median":
            made.on_update.append(fill_second_moment(self.optimizer, made.layers))
        return made

    def build_model(self, initial: torch.Generator) -> tuple[nn.Module, dict[str, float]]:
        model, final = super().build_model(initial)
        layers = {n: m for n, m in model.named_modules() if isinstance(m, ds.nn.SparseLinear)}
        if self.chosen.allocation != "uniform":
            shapes = {name: layer.pattern.shape for name, layer in layers.items()}
            counts = allocate(shapes, 1 - self.chosen.sparsity, method=self.chosen.allocation)
            for name, layer in layers.items():
                layer.resizable = True  # its number of weights may change
                density = counts[name] / layer.pattern.total
                layer.set_pattern(ds.SparsePattern.random(shapes[name], density, generator=initial))
                layer.reset_parameters(initial)
            scale_matrices(model, self.options.initial_scale)
        if self.chosen.masked:
            replace_sparse(model, MaskedLinear)
        return model, final

    def optimise(self, sums: Sums) -> None:
        if self.chosen.masked:
            self.step += 1
            sums.steps += 1
            self.masked.step()
            return
        more = self.chosen.batches - 1
        if self.chosen.noise:
            more = 95 if (self.step + 1) / self.options.steps in NOISE_AT else 0
        if more and self.trainer is not None and self.trainer._is_due(self.step + 1):
            self._add_batches(more)
        super().optimise(sums)

    def _add_batches(self, batches: int) -> None:
        """Run backward passes for growth only; restore the gradients of the step."""
        kept = [(p.grad, p.grad.clone()) for p in self.model.parameters() if p.grad is not None]
        for _ in range(batches):
            batch = self.corpus.batch(
                self.options.batch_size, self.options.sequence_length, self.others
            )
            self.losses(batch)[0].backward()
        for grad, before in kept:
            grad.copy_(before)


def train(options: Options, corpus: Corpus, seed: int, name: str) -> dict[str, Any]:
    """Train once; return the figures."""
    begin = time.perf_counter()
    study = Study(options, corpus, seed, variant(name))
    history = list(study.run(options.steps))
    test = study.evaluate("test")
    growth = getattr(study.trainer, "growth", None)
    return {
        "variant": name,
        "seed": seed,
        "layers": options.layers,
        "hidden": options.hidden_size,
        "steps": options.steps,
        "rate": options.peak_learning_rate,
        "valid": [[entry["step"], round(entry["valid_loss"], 5)] for entry in history],
        "train": [[entry["step"], round(entry["loss"], 5)] for entry in history],
        "test": round(test.loss, 5),
        "updates": [] if study.watch is None else _rounded(study.watch.updates),
        "noise": _rounded(growth.found) if isinstance(growth, NoisyGrowth) else [],
        "seconds": round(time.perf_counter() - begin, 1),
    }


def _rounded(thing: Any) -> Any:
    if isinstance(thing, dict):
        return {key: _rounded(value) for key, value in thing.items()}
    if isinstance(thing, list):
        return [_rounded(value) for value in thing]
    return round(thing, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    corpus = load_corpus(Options(data=arguments.data))
    for seed in arguments.seeds:
        for name in arguments.variants:
            options = Options(
                data=arguments.data,
                method="static",
                hidden_size=arguments.hidden_size,
                ff_size=4 * arguments.hidden_size,
                sparsity=variant(name).sparsity,
                steps=arguments.steps,
                peak_learning_rate=arguments.rate,
                valid_interval=500,
            )
            row = train(options, corpus, seed, name)
            with arguments.output.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(name, seed, row["valid"][-1][1], row["seconds"], flush=True)


if __name__ == "__main__":
    main()
