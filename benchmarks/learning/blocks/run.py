"""Blocks of reordered features: one training per variant and seed, a line of JSON each.

    python benchmarks/learning/blocks/run.py --data input.txt --block 32 --seeds 0 1 2 \
        --variants plain "heads, balanced, matched" --output results.jsonl

--block 1 with the variant plain is elements. The variants are in variants.py.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from cuts import Ordered, best_cut, recut, spread
from places import Placed
from starts import balanced, match, wide
from torch import Tensor
from variants import Variant, variant

from dynsparse.apps.common.training import Sums
from dynsparse.apps.lm.corpus import Corpus, load_corpus
from dynsparse.apps.lm.options import Options
from dynsparse.apps.lm.training import Training
from dynsparse.nn import SparseLinear
from dynsparse.ops import capture
from dynsparse.training import CosineSchedule

WRITE_HEADS = ("q_proj", "k_proj", "v_proj")
WRITE_STREAM = ("out_proj", "linear2")


class Carried(CosineSchedule):
    """Carries the remainder of rounding down to the next updates."""

    def drop_count(self, step: int, nnz: int) -> int:
        def until(last: int) -> int:
            steps = range(self.update_interval, last + 1, self.update_interval)
            return int(self.drop_fraction * nnz * sum(map(self.share, steps)) + 1e-9)

        return until(step) - until(step - self.update_interval)


class Study(Training):
    """The training of `dynsparse lm`, with blocks cut as in the variant.

    Attributes:
        cut_seconds: CPU time for finding and applying orders; kept: the share of the weights'
            magnitude that each change of order kept, mean over layers.
    """

    def __init__(self, options: Options, corpus: Corpus, seed: int, chosen: Variant) -> None:
        super().__init__(options, corpus, seed)
        self.chosen = chosen
        self.cut_seconds = 0.0
        self.kept: list[float] = []
        self._pairs: dict[str, Any] = {}
        self.blocks = {
            name: layer
            for name, layer in self.model.named_modules()
            if isinstance(layer, SparseLinear) and layer.block_size > 1
        }
        if chosen.rounding == "carried":
            old = self.trainer.schedule
            self.trainer.schedule = Carried(
                old.total_steps, old.update_interval, old.drop_fraction, end_fraction=1.0
            )
        draw = torch.Generator().manual_seed(seed)
        for name, layer in self.blocks.items():
            self._order(name, layer, draw)
        if chosen.balanced:
            for layer in self.blocks.values():
                layer.set_pattern(balanced(layer.pattern, draw))
        if chosen.wide:
            for name, layer in self.blocks.items():
                layer.set_pattern(wide(layer.pattern, name.endswith(("out_proj", "linear2"))))
        if chosen.matched:
            match(self.blocks)
        if chosen.balanced or chosen.matched or chosen.wide:
            for layer in self.blocks.values():
                bias = layer.bias.detach().clone()
                layer.reset_parameters(draw)
                with torch.no_grad():
                    layer.bias.copy_(bias)

    def _order(self, name: str, layer: SparseLinear, draw: torch.Generator) -> None:
        height, width = layer.pattern.shape
        inputs, outputs = torch.arange(width), torch.arange(height)
        if self.chosen.order == "random":
            inputs, outputs = (torch.randperm(n, generator=draw) for n in (width, height))
        elif self.chosen.order == "heads" and name.endswith(WRITE_HEADS):
            outputs = spread(height, layer.block_size)
        elif self.chosen.order == "heads" and name.endswith("out_proj"):
            inputs = spread(width, layer.block_size)
        elif self.chosen.order == "crossed" and name.endswith(WRITE_STREAM):
            outputs = spread(height, layer.block_size)
        if self.chosen.places:
            layer.executor = Placed(inputs, outputs)
        elif self.chosen.order:
            layer.executor = Ordered(inputs, outputs)

    def optimise(self, sums: Sums) -> None:
        super().optimise(sums)
        begin = time.process_time()
        moment = max(2, self.options.steps // 50)
        if self._pairs:
            self._cut()
        if self.chosen.captured and self.step + 1 == moment:
            self._pairs = {
                name: capture.start(layer.index.row_ptr, layer.values)
                for name, layer in self.blocks.items()
            }
        if self.chosen.places:
            self._move_places()
        self.cut_seconds += time.process_time() - begin

    def _move_places(self) -> None:
        end = self.options.pattern_steps
        every = max(2, end // 10)
        for layer in self.blocks.values():
            placed = layer.executor
            assert isinstance(placed, Placed)
            if placed.looks:
                share = 0.15 * (1 + math.cos(math.pi * self.step / end))
                placed.update(layer, self.optimizer, share)
                placed.seen = []
            # Halfway between two pattern updates.
            placed.looks = (self.step + 1) % every == every // 2 and self.step + 1 < end

    @torch.no_grad()
    def _cut(self) -> None:
        kept = []
        for name, layer in self.blocks.items():
            gradient = sum(dy.t() @ x for x, dy in self._pairs[name])
            assert isinstance(gradient, Tensor)
            if isinstance(layer.executor, Ordered):
                gradient = layer.executor.natural(gradient)
            inputs, outputs, _ = best_cut(gradient.abs(), layer.block_size, layer.pattern.nnz)
            kept.append(recut(layer, self.optimizer, inputs, outputs, gradient))
        self._pairs = {}
        self.kept.append(sum(kept) / len(kept))


def train(arguments: argparse.Namespace, seed: int, name: str) -> dict[str, Any]:
    """Train once; return the figures."""
    chosen = variant(name)
    options = Options(
        data=arguments.data,
        method=chosen.method,
        block_size=arguments.block,
        hidden_size=arguments.hidden_size,
        ff_size=4 * arguments.hidden_size,
        steps=arguments.steps,
        valid_interval=arguments.steps,
        evaluation_tokens=32_768,
        batch_size=16,
        sequence_length=arguments.sequence,
        sparsity=0.9,
        interleave_heads=chosen.interleave,
        match_blocks=chosen.match,
        prune_rounding="down" if chosen.rounding == "down" else "up",
    )
    begin = time.process_time()
    study = Study(options, load_corpus(options), seed, chosen)
    history = list(study.run(options.steps))
    sparse = {n: m for n, m in study.model.named_modules() if isinstance(m, SparseLinear)}
    if arguments.save:
        torch.save({n: m.to_dense().detach() for n, m in sparse.items()}, arguments.save)
    total = sum(layer.in_features * layer.out_features for layer in sparse.values())
    return {
        "variant": name,
        "block": arguments.block,
        "seed": seed,
        "hidden": arguments.hidden_size,
        "steps": arguments.steps,
        "tokens": study.tokens_per_step,
        "final": round(history[-1]["valid_loss"], 5),
        "density": round(sum(layer.values.numel() for layer in sparse.values()) / total, 4),
        "kept": [round(share, 3) for share in study.kept],
        "cut_seconds": round(study.cut_seconds, 2),
        "seconds": round(time.process_time() - begin, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--variants", nargs="+", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument(
        "--save", type=Path, help="save the weights of the last training for clusters.py"
    )
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for seed in arguments.seeds:
        for name in arguments.variants:
            row = train(arguments, seed, name)
            with arguments.output.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(name, seed, row["final"], row["kept"], row["seconds"], flush=True)


if __name__ == "__main__":
    main()
